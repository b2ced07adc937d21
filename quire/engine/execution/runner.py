"""ModelRunner: a plan in, sampled tokens out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.execution.attention.backend import AttentionBackend
from quire.engine.execution.batch import Layout, Span, StepInputs
from quire.engine.execution.sampling.logprobs import report
from quire.engine.execution.sampling.sampler import Choice, Sampler
from quire.engine.execution.table import RequestTable
from quire.engine.models.decoder import CausalLM
from quire.engine.scheduling.plan import Sampled, StepPlan, StepResult
from quire.engine.wire.protocol import TokenLogprobs

_LOGIT_ROWS = 256  # rows of logits at once, where whole prompts are wanted


class ModelRunner:
    """Keeps the request table and runs model and sampler over it."""

    def __init__(self, model: CausalLM, attention: AttentionBackend, table: RequestTable, sampler: Sampler) -> None:
        self._model = model
        self._attention = attention
        self._table = table
        self._sampler = sampler
        self._layout = Layout(table)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        emptied, filled = self._table.apply(plan)
        self._sampler.update(emptied, filled)
        if not plan.work:
            return StepResult([])
        inputs = self._layout.inputs(plan.work)
        attend = self._attention.plan(inputs)
        sampling = [span for span in inputs.spans if span.samples]
        reporting = [span for span in inputs.spans if self._reports(span)]
        if attend.stays and not reporting:
            logits = self._model.decode(inputs.tokens, inputs.positions, attend)
            return StepResult(self._sample(logits, sampling) if sampling else [])
        needed = _rows(sampling, reporting)
        features = self._model.forward(inputs.tokens, inputs.positions, attend, needed)
        count = sum(1 + len(span.draft) for span in sampling)
        sampled = self._sample(self._model.logits(features[:count]), sampling) if sampling else []
        return StepResult(sampled, self._report_prompts(features[count:], reporting, inputs))

    def check(self) -> None:
        """Assert that the books balance."""
        self._table.check()

    def _sample(self, logits: Tensor, spans: Sequence[Span]) -> list[Sampled]:
        """The next tokens of the spans' sequences from the logits of each one's last token and of its draft.

        In rounds: a sequence whose draft was right goes on with the draft's next token, so that each token is sampled
        in the light of all before it, as it would be without a draft.
        """
        ends = itertools.accumulate(1 + len(span.draft) for span in spans)
        firsts = [end - 1 - len(span.draft) for span, end in zip(spans, ends, strict=True)]
        chosen: list[list[Choice]] = [[] for _ in spans]
        going = list(range(len(spans)))
        for depth in itertools.count():
            here = logits if len(going) == len(logits) else logits[[firsts[i] + depth for i in going]]
            for i, choice in zip(going, self._sampler.sample(here, [spans[i].row for i in going]), strict=True):
                chosen[i].append(choice)
            going = [i for i in going if _was_right(spans[i].draft, depth, chosen[i][-1])]
            if not going:
                break
        return [self._sampled(span, choices) for span, choices in zip(spans, chosen, strict=True)]

    def _sampled(self, span: Span, choices: Sequence[Choice]) -> Sampled:
        row = self._table[span.row]
        logprobs = [choice.logprobs for choice in choices if choice.logprobs is not None]
        return Sampled(row.request_id, [choice.token for choice in choices], logprobs or None, choices[-1].error)

    def _reports(self, span: Span) -> bool:
        """Whether something is to be told of tokens that follow the span's."""
        row = self._table[span.row]
        return row.prompt_logprobs is not None and span.start < row.prompt_len - 1

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


def _was_right(draft: Sequence[int], depth: int, choice: Choice) -> bool:
    return depth < len(draft) and draft[depth] == choice.token and choice.error is None


def _rows(sampling: Sequence[Span], reporting: Sequence[Span]) -> Tensor:
    """Rows of the batch whose features are needed.

    First the last known token and the draft of each sequence that samples, then all tokens of reported ones.
    """
    last = [
        row
        for span in sampling
        for row in range(span.offset + span.count - 1 - len(span.draft), span.offset + span.count)
    ]
    every = (row for span in reporting for row in range(span.offset, span.offset + span.count))
    return torch.tensor([*last, *every], dtype=torch.int64)
