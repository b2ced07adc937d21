"""The runners of models that several ranks run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial

import torch
from typing_extensions import override

from quire.engine.execution.inputs import StepInputs
from quire.engine.execution.request_table import Changes
from quire.engine.execution.runner import Computed, ModelRunner, StartedStep
from quire.engine.scheduling.plan import SampledTokens


class LeadingRunner(ModelRunner):
    """The core's, which samples. The other ranks wait in a step that fails here, so it ends the engine."""

    contains_failures = False


class PipelineRunner(LeadingRunner):
    """The core's, of the first stage. It does not wait for the other stages before a step's result is asked for.

    Until then the rows of the step's sequences must not be freed.
    """

    @override
    def _run(self, inputs: StepInputs) -> Computed:
        """Run the first stage; of the hidden states only their number is right."""
        attention, last_token_only = self._attention.prepare(inputs), not self._wants_hidden(inputs.spans)
        return Computed(inputs, None, self.model.run(inputs.model, attention.attend, last_token_only=last_token_only))

    @override
    def _finish(self, computed: Computed, step: StartedStep) -> None:
        step.finish = partial(self._finish_later, computed, step)

    @torch.inference_mode()
    def _finish_later(self, computed: Computed, step: StartedStep) -> None:
        """Wait for the logits, and sample."""
        inputs, hidden = computed.inputs, computed.hidden
        assert hidden is not None
        if self._wants_hidden(inputs.spans):
            super()._finish(Computed(inputs, self._sampled_logits(hidden, inputs.spans), hidden), step)
        else:
            super()._finish(Computed(inputs, self.model.lm_head.logits(hidden)), step)


class FollowingRunner(ModelRunner):
    """A worker's: it computes what the core does in the same order, but only the core has the logits."""

    contains_failures = False

    def append(self, sampled: Iterable[SampledTokens]) -> None:
        """Append the tokens that the core has sampled from the step before."""
        for sequence in sampled:
            row = self._table.row_of(sequence.request_id)
            if self._states is not None:
                self._states.verified(row, len(sequence.tokens) - 1)
            for token in sequence.tokens:
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
