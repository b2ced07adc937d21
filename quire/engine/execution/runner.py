"""ModelRunner: a plan in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.execution.attention.backend import AttentionBackend
from quire.engine.execution.batch import Span, StepInputs, build_inputs
from quire.engine.execution.sampling.logprobs import report
from quire.engine.execution.sampling.sampler import Sampler
from quire.engine.execution.table import RequestTable
from quire.engine.models.decoder import CausalLM
from quire.engine.scheduling.plan import StepPlan, StepResult
from quire.engine.wire.protocol import TokenLogprobs

_LOGIT_ROWS = 256  # rows of logits at once, where whole prompts are wanted


class ModelRunner:
    """Keeps the request table and runs model and sampler over it."""

    def __init__(self, model: CausalLM, attention: AttentionBackend, table: RequestTable, sampler: Sampler) -> None:
        self._model = model
        self._attention = attention
        self._table = table
        self._sampler = sampler

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        emptied, filled = self._table.apply(plan)
        self._sampler.update(emptied, filled)
        if not plan.work:
            return StepResult([])
        inputs = build_inputs(plan.work, self._table)
        sampling = [span for span in inputs.spans if span.samples]
        reporting = [span for span in inputs.spans if self._table[span.row].prompt_logprobs is not None]
        needed = _rows(sampling, reporting)
        attend = self._attention.plan(inputs)
        features = self._model.forward(inputs.tokens, inputs.positions, attend, needed)
        rows = [span.row for span in sampling]
        sampled = self._sampler.sample(self._model.logits(features[: len(rows)]), rows) if rows else []
        return StepResult(sampled, self._report_prompts(features[len(rows) :], reporting, inputs))

    def check(self) -> None:
        """Assert that the books balance."""
        self._table.check()

    def _report_prompts(
        self, features: Tensor, spans: Sequence[Span], inputs: StepInputs
    ) -> dict[str, list[TokenLogprobs]]:
        """Log-probabilities of the prompt tokens that follow those of this step; features are the spans' own."""
        reports: dict[str, list[TokenLogprobs]] = {}
        offset = 0
        for span in spans:
            row = self._table[span.row]
            # The token behind each position; behind the prompt's last one it is no longer the prompt's.
            following = self._table.tokens[span.row, span.start + 1 : min(span.length, row.prompt_len - 1) + 1].tolist()
            own = features[offset : offset + len(following)]
            offset += span.count
            reports[row.request_id] = [
                entry
                for begin in range(0, len(following), _LOGIT_ROWS)
                for entry in report(
                    self._model.logits(own[begin : begin + _LOGIT_ROWS]),
                    following[begin : begin + _LOGIT_ROWS],
                    row.prompt_logprobs or 0,
                )
            ]
        return reports


def _rows(sampling: Sequence[Span], reporting: Sequence[Span]) -> Tensor:
    """Rows of the batch whose features are needed: the last of sequences that sample, then all of reported ones."""
    last = [span.offset + span.count - 1 for span in sampling]
    every = (row for span in reporting for row in range(span.offset, span.offset + span.count))
    return torch.tensor([*last, *every], dtype=torch.int64)
