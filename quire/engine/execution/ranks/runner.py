"""The runners of models that several ranks run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from typing_extensions import override

from quire.engine.execution.request_table import Changes
from quire.engine.execution.runner import Computed, ModelRunner, StartedStep
from quire.engine.scheduling.plan import SampledTokens


class LeadingRunner(ModelRunner):
    """The core's, which samples. The other ranks wait in a step that fails here, so it ends the engine."""

    contains_failures = False


class FollowingRunner(ModelRunner):
    """A worker's: it computes what the core does in the same order, but only the core has the logits."""

    contains_failures = False

    def append(self, sampled: Iterable[SampledTokens]) -> None:
        """Append the tokens that the core has sampled from the step before."""
        for one in sampled:
            row = self._table.row_of(one.request_id)
            for token in one.tokens:
                self._table.append(row, token)

    @override
    def _update(self, changes: Changes) -> None:
        pass  # nothing is sampled or pooled here

    @override
    def _finish(self, computed: Computed, step: StartedStep) -> None:
        """Take part in the output projections of what the core reports."""
        if computed.hidden is None:
            return
        for span in filter(self._reports_prompt, computed.spans):
            deque(self._prompt_logits(computed.hidden, span), maxlen=0)
        for span in filter(self._wants_probs, computed.spans):
            self._wanted_logits(computed.hidden, span)
