"""ModelRunner: runs the plans of the scheduler on a model."""

from __future__ import annotations

import logging
import math
import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from quire.engine.client.protocol import TokenLogprobs
from quire.engine.client.sampling_params import SamplingParams, TokenProbs
from quire.engine.execution.alignment import Aligner
from quire.engine.execution.attention.backend import AttentionBackend
from quire.engine.execution.inputs import InputBuilder, Span, StepInputs
from quire.engine.execution.item_encoder import ItemEncoder
from quire.engine.execution.pooling import ChunkPooler, Pooler, add_pooled
from quire.engine.execution.request_table import Changes, RequestTable
from quire.engine.execution.sampling.logprobs import top_logprobs
from quire.engine.execution.sampling.pending import PendingTokens, SampledToken, TokenSampler
from quire.engine.execution.states import StateCaches
from quire.engine.execution.step_graphs import StepRunner
from quire.engine.models.networks.decoder import LanguageModel
from quire.engine.scheduling.plan import (
    NOT_FINITE,
    SampledTokens,
    ScheduledSequence,
    SequenceError,
    StepPlan,
    StepResult,
)

logger = logging.getLogger(__name__)
LOGITS_CHUNK = 256  # rows of logits at a time, for the log-probabilities of prompts


@dataclass(frozen=True, slots=True)
class Computed:
    """The model's results of a step. `hidden`: hidden states of all tokens, where more than logits is wanted."""

    inputs: StepInputs
    logits: Tensor | None
    hidden: Tensor | None = None

    @property
    def spans(self) -> Sequence[Span]:
        """The spans of the step."""
        return self.inputs.spans


@dataclass(slots=True)
class StartedStep:
    """A step whose work was submitted.

    Attributes:
        known: what is known of its result.
        pending: tokens that are sampled, with the ids of their sequences.
        finish: waits for the logits and samples, if that is not done yet.
    """

    known: StepResult = field(default_factory=StepResult)
    pending: list[tuple[list[str], PendingTokens]] = field(default_factory=list)
    finish: Callable[[], None] | None = None

    def is_done(self) -> bool:
        """Whether all tokens are known."""
        return self.finish is None and all(tokens.is_done() for _, tokens in self.pending)

    def result(self) -> StepResult:
        """The result of the step; waits for its tokens. Called once."""
        if self.finish is not None:
            self.finish()
        for request_ids, tokens in self.pending:
            for request_id, choice in zip(request_ids, tokens.result(), strict=True):
                _report(request_id, [choice], self.known)
        return self.known


class ModelRunner:
    """Keep the request table up to date, and run model, sampler and pooler over it.

    Attributes:
        contains_failures: an exception ends the sequences for which it occurs; False: it ends the engine.
    """

    contains_failures = True

    def __init__(
        self,
        model: LanguageModel,
        inputs: InputBuilder,
        attention: AttentionBackend,
        steps: StepRunner,
        table: RequestTable,
        sampler: TokenSampler,
        pooler: Pooler,
        items: ItemEncoder,
        aligner: Aligner | None = None,
        states: StateCaches | None = None,
        inbox: int | None = None,
    ) -> None:
        """`inbox`: the file descriptor from which something can be read when a message has arrived for the core."""
        self.model = model
        self.steps = steps
        self.items = items
        self._inputs = inputs
        self._attention = attention
        self._table = table
        self._sampler = sampler
        self._pooler = ChunkPooler(table, pooler)
        self._aligner = aligner
        self._states = states
        self._inbox = inbox

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        return self.start(plan).result()

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> StartedStep:
        """Submit the work of one step to the device; where the device is the CPU, it is then done."""
        changes = self._table.apply(plan)
        if any(changes):
            self._update(changes)
            if self._states is not None:
                self._states.removed(changes.freed)
                for new in plan.new:
                    if new.snapshot is not None:
                        self._states.copy_in(self._table.row_of(new.request_id), new.snapshot)
        step = StartedStep()
        self.items.update(plan)
        if not plan.scheduled:
            return step
        try:
            self.items.prepare(plan, plan.scheduled)
            computed = self._compute(plan.scheduled)
        except Exception as error:  # error boundary: only the sequences for which it fails alone end
            if not self.contains_failures:
                raise
            if self._states is not None:
                self._lose(plan, step, error)
            else:
                logger.exception("a step failed; its sequences are computed one by one")
                self._execute_alone(plan, step)
        else:
            self._finish(computed, step)
            if plan.further_steps and computed.hidden is None:
                self._run_ahead(plan, computed.inputs, step)
        for request_id, reason in self.items.refusals(plan.scheduled).items():
            step.known.errors[request_id] = SequenceError(reason, invalid=True)
        return step

    def _run_ahead(self, plan: StepPlan, inputs: StepInputs, step: StartedStep) -> None:
        """Run further steps, each with the tokens that the one before has sampled, and report the tokens of all.

        The last one is that in which a sequence may have ended, or a message has arrived. Rows of logits are in the
        same order in all of them.
        `inputs`: of the first step.
        """
        request_ids, tokens = step.pending.pop()
        chosen = [[token] for token in tokens.result()]
        rows = [self._table.row_of(request_id) for request_id in request_ids]
        if not self._may_end(rows, chosen) and not self._has_message():
            decode = partial(self.steps.decode, inputs, inbox=self._inbox)
            following = self._sampler.sample_following(rows, plan.further_steps, decode)
            if following is not None:
                chosen = [[*first, *others] for first, others in zip(chosen, following, strict=True)]
            elif not self._decode_step_by_step(plan, rows, chosen, step):
                return
        for request_id, row_tokens in zip(request_ids, chosen, strict=True):
            _report(request_id, row_tokens, step.known)

    def _decode_step_by_step(
        self, plan: StepPlan, rows: Sequence[int], chosen: list[list[SampledToken]], step: StartedStep
    ) -> bool:
        """Run further steps, and add their tokens to those of each row.

        Returns:
            Whether the states of sequences are those behind their tokens.
        """
        for distance in range(1, plan.further_steps + 1):
            if self._may_end(rows, chosen) or self._has_message():
                break
            scheduled = [
                ScheduledSequence(item.request_id, item.start + distance, 1, (), samples=True)
                for item in plan.scheduled
            ]
            try:
                computed = self._compute(scheduled)
            except Exception as error:  # error boundary: the next step finds out for which sequences it fails
                if not self.contains_failures:
                    raise
                if self._states is not None:
                    self._lose(plan, step, error)
                    return False
                logger.exception("a further step failed; its sequences are scheduled again")
                break
            assert computed.logits is not None
            for row_tokens, token in zip(chosen, self._sampler.start(computed.logits, rows).result(), strict=True):
                row_tokens.append(token)
        return True

    def _may_end(self, rows: Sequence[int], chosen: Sequence[Sequence[SampledToken]]) -> bool:
        """Whether a sequence may end with the last token that was sampled for it."""
        return any(
            last.error is not None or last.token in params.eos_token_ids or last.token in params.stop_token_ids
            for params, (*_, last) in zip(self._table.params_of(rows), chosen, strict=True)
        )

    def _has_message(self) -> bool:
        """Whether a message has arrived for the core."""
        if self._inbox is None:
            return False
        poller = select.poll()
        poller.register(self._inbox, select.POLLIN)
        return bool(poller.poll(0))

    def _update(self, changes: Changes) -> None:
        """Rows of the table have changed."""
        # Nothing has been sampled for a prompt that becomes longer: its state is made anew.
        self._sampler.update([*changes.freed, *changes.extended], [*changes.filled, *changes.extended])
        self._pooler.update(changes.freed, changes.filled)
        if self._aligner is not None:
            self._aligner.update(changes.freed, changes.filled)

    def _compute(self, scheduled: Sequence[ScheduledSequence]) -> Computed:
        """Run the model."""
        inputs = self._with_items(self._inputs.build(scheduled), scheduled)
        if self._states is None:
            return self._run(inputs)
        states = self._states.of_step(inputs.spans, inputs.padded)
        computed = self._run(replace(inputs, model=replace(inputs.model, states=states)))
        states.commit()
        for item in scheduled:
            if item.snapshot is not None:
                self._states.copy_out(self._table.row_of(item.request_id), item.snapshot)
        return computed

    def _lose(self, plan: StepPlan, step: StartedStep, error: Exception) -> None:
        """Report a failed step that may have changed states: they cannot be those before it again.

        Its sequences are computed from their beginning, each in steps of its own. So a sequence that is alone ends.
        """
        request_ids = [item.request_id for item in plan.scheduled]
        if len(request_ids) > 1:
            logger.error("a step failed; its sequences are computed again, one by one", exc_info=error)
            step.known.lost.extend(request_ids)
        else:
            logger.error("the model failed for request %s", request_ids[0], exc_info=error)
            step.known.errors[request_ids[0]] = _failure(error)
        step.known.not_encoded.extend(self.items.missing(plan))

    def _run(self, inputs: StepInputs) -> Computed:
        attention = self._attention.prepare(inputs)
        if not self._wants_hidden(inputs.spans):
            return Computed(inputs, self.steps.logits(inputs, attention))
        cross = attention.cross
        if self._aligner is not None and cross is not None:
            cross = self._aligner.watch(cross, inputs.spans)
        hidden = self.model.run(inputs.model, attention.attend, cross=cross)
        return Computed(inputs, self._sampled_logits(hidden, inputs.spans), hidden)

    def _sampled_logits(self, hidden: Tensor, spans: Sequence[Span]) -> Tensor | None:
        """Logits of the tokens from which spans sample, of the hidden states of all tokens; None if none samples."""
        sampling = [span for span in spans if span.samples]
        return self.model.lm_head.logits(hidden, rows=_rows_to_sample(sampling)) if sampling else None

    def _with_items(self, inputs: StepInputs, scheduled: Sequence[ScheduledSequence]) -> StepInputs:
        """The inputs with the embeddings of items."""
        if not self.items.changes_embeddings:
            return inputs
        of_row = {self._table.row_of(sequence.request_id): sequence for sequence in scheduled}
        items = self.items.embeddings([(span, of_row[span.row]) for span in inputs.spans])
        return inputs if items is None else replace(inputs, model=replace(inputs.model, items=items))

    def _finish(self, computed: Computed, step: StartedStep) -> None:
        """Sample, and add pooled arrays and log-probabilities of prompts to the result."""
        spans, result = computed.spans, step.known
        sampling = [span for span in spans if span.samples]
        if computed.logits is not None and any(span.draft for span in sampling):
            self._verify_drafts(computed.logits, sampling, result)
        elif computed.logits is not None and sampling:
            request_ids = [self._table[span.row].request_id for span in sampling]
            step.pending.append((request_ids, self._sampler.start(computed.logits, [span.row for span in sampling])))
        if computed.hidden is not None:
            self._report_prompts(computed.hidden, [span for span in spans if self._reports_prompt(span)], result)
            self._report_probs(computed.hidden, [span for span in spans if self._wants_probs(span)], result)
            self._pool(computed.hidden, [span for span in spans if span.row in self._pooler.rows], result)
            self._align([span for span in spans if self._aligns(span)], result)

    def _execute_alone(self, plan: StepPlan, step: StartedStep) -> None:
        """Run each sequence of a step that failed, in order: a sequence may read blocks that an earlier one writes."""
        crosses = {new.request_id: new.cross_attention for new in plan.new if new.cross_attention is not None}
        broken: set[int] = set()  # blocks that were not computed
        for item in plan.scheduled:
            row = self._table.row_of(item.request_id)
            blocks = self._table.blocks_of(row)
            cross = crosses.get(item.request_id)
            encoded = () if cross is None else cross.blocks
            try:
                if not broken.isdisjoint((*blocks, *encoded)):
                    raise RuntimeError("the computation of another request with the same prefix failed")
                self.items.prepare(plan, [item])
                computed = self._compute([item])
            except Exception as error:  # error boundary: only this sequence fails
                logger.exception("the model failed for request %s", item.request_id)
                step.known.errors[item.request_id] = _failure(error)
                broken.update(self._table.blocks_of(row, item.start))
                broken.update(encoded if cross is not None and cross.item is not None else ())
            else:
                self._finish(computed, step)
        step.known.not_encoded.extend(self.items.missing(plan))

    def check(self) -> None:
        """Assert that the request table is consistent."""
        self._table.check()
        if self._states is not None:
            self._states.check()

    def close(self) -> None:
        """End the sampler's threads."""
        self._sampler.close()

    def _wants_hidden(self, spans: Sequence[Span]) -> bool:
        """Whether more than the logits of the spans' last tokens is wanted."""
        table = self._table
        aligns = self._aligner is not None and bool(self._aligner.rows)
        if aligns or self._pooler.rows or table.rows_with_prompt_logprobs or table.rows_with_token_probs:
            return any(
                span.draft
                or span.row in self._pooler.rows
                or self._reports_prompt(span)
                or self._wants_probs(span)
                or self._aligns(span)
                for span in spans
            )
        return any(span.draft for span in spans)

    def _verify_drafts(self, logits: Tensor, spans: Sequence[Span], result: StepResult) -> None:
        """Sample from the logits of each span's last known token and of its draft."""
        choices = self._sampler.verify(logits, [span.row for span in spans], [span.draft for span in spans])
        for span, chosen in zip(spans, choices, strict=True):
            if self._states is not None:
                self._states.verified(span.row, len(chosen) - 1)
            _report(self._table[span.row].request_id, chosen, result)

    @contextmanager
    def _containing(self, span: Span, what: str, result: StepResult) -> Iterator[str]:
        """Gives the request id of a span; an exception within ends that sequence only."""
        request_id = self._table[span.row].request_id
        try:
            yield request_id
        except Exception as error:  # error boundary: only this sequence fails
            if not self.contains_failures:
                raise
            logger.exception("%s of request %s failed", what, request_id)
            result.errors[request_id] = SequenceError(f"{what} failed: {type(error).__name__}: {error}")

    def _reports_prompt(self, span: Span) -> bool:
        """Whether log-probabilities of prompt tokens after the span's are wanted."""
        row = self._table[span.row]
        return row.prompt_logprobs is not None and span.start < row.prompt_len - 1

    def _report_prompts(self, hidden: Tensor, spans: Sequence[Span], result: StepResult) -> None:
        """Log-probabilities of the prompt tokens that follow those of this step."""
        for span in spans:
            with self._containing(span, "prompt_logprobs", result) as request_id:
                entries = self._prompt_logprobs(hidden, span)
                if all(math.isfinite(entry.logprobs[0]) for entry in entries):
                    result.prompt_logprobs[request_id] = entries
                else:
                    result.errors[request_id] = NOT_FINITE

    def _wants_probs(self, span: Span) -> bool:
        """Whether probabilities after one of the span's tokens are wanted."""
        if span.row not in self._table.rows_with_token_probs:
            return False
        token_probs = self._table.params_of([span.row])[0].token_probs
        return token_probs is not None and span.start <= token_probs.position < span.length

    def _report_probs(self, hidden: Tensor, spans: Sequence[Span], result: StepResult) -> None:
        """Probabilities of tokens after a position of a prompt."""
        for span in spans:
            with self._containing(span, "token_probs", result) as request_id:
                probs = self._token_probs(hidden, span)
                if all(map(math.isfinite, probs)):
                    result.token_probs[request_id] = probs
                else:
                    result.errors[request_id] = NOT_FINITE

    def _token_probs(self, hidden: Tensor, span: Span) -> list[float]:
        token_probs = self._wanted_probs(span)
        probs: Tensor = self._wanted_logits(hidden, span)[0].softmax(-1)
        return [float(prob) for prob in probs[list(token_probs.token_ids)]]

    def _wanted_logits(self, hidden: Tensor, span: Span) -> Tensor:
        """Logits (1, vocab) of the position after which probabilities are wanted."""
        at = span.offset + self._wanted_probs(span).position - span.start
        return self.model.lm_head.logits(hidden, rows=slice(at, at + 1))

    def _wanted_probs(self, span: Span) -> TokenProbs:
        token_probs = self._table.params_of([span.row])[0].token_probs
        assert token_probs is not None
        return token_probs

    def _aligns(self, span: Span) -> bool:
        return self._aligner is not None and span.row in self._aligner.rows

    def _align(self, spans: Sequence[Span], result: StepResult) -> None:
        """The alignments of the spans of requests whose last token was computed."""
        for span in spans:
            assert self._aligner is not None
            with self._containing(span, "the alignment", result) as request_id:
                if (aligned := self._aligner.finish(span)) is not None:
                    add_pooled(result, request_id, aligned)

    def _pool(self, hidden: Tensor, spans: Sequence[Span], result: StepResult) -> None:
        """Pool the hidden states of the spans of pooling requests."""
        for span in spans:
            with self._containing(span, "pooling", result) as request_id:
                pooled = self._pooler.pool(hidden[span.offset : span.offset + span.count], span)
                if pooled is not None:
                    add_pooled(result, request_id, pooled)

    def _prompt_logprobs(self, hidden: Tensor, span: Span) -> list[TokenLogprobs]:
        row, position = self._table[span.row], span.start + 1
        prompt_token_ids = row.params.prompt_token_ids if isinstance(row.params, SamplingParams) else None
        entries: list[TokenLogprobs] = []
        for tokens, logits in self._prompt_logits(hidden, span):
            positions = range(position, position + len(tokens))
            listed = [] if prompt_token_ids is None else [prompt_token_ids.row(at) for at in positions]
            entries += top_logprobs(logits, tokens, row.prompt_logprobs or 0, listed)
            position += len(tokens)
        return entries

    def _prompt_logits(self, hidden: Tensor, span: Span) -> Iterator[tuple[list[int], Tensor]]:
        """Prompt tokens after those of a span, and the logits (tokens, vocab) before each, in pieces."""
        row = self._table[span.row]
        # The token after each position; the token after the prompt's last one is not a prompt token.
        tokens = self._table.tokens[span.row, span.start + 1 : min(span.length, row.prompt_len - 1) + 1].tolist()
        for begin in range(0, len(tokens), LOGITS_CHUNK):
            chunk, first = tokens[begin : begin + LOGITS_CHUNK], span.offset + begin
            yield chunk, self.model.lm_head.logits(hidden, rows=slice(first, first + len(chunk)))


def _report(request_id: str, chosen: Sequence[SampledToken], result: StepResult) -> None:
    """Add the tokens that were sampled for a sequence to the result of a step."""
    error = chosen[-1].error
    if error is not None:
        result.errors[request_id] = error
        return
    logprobs = [choice.logprobs for choice in chosen if choice.logprobs is not None]
    result.sampled.append(SampledTokens(request_id, [choice.token for choice in chosen], logprobs or None))


def _failure(error: Exception) -> SequenceError:
    return SequenceError(f"the model failed: {type(error).__name__}: {error}")


def _rows_to_sample(spans: Sequence[Span]) -> Tensor:
    """Rows of the last known token and of the draft of each span."""
    rows = [
        row for span in spans for row in range(span.offset + span.count - 1 - len(span.draft), span.offset + span.count)
    ]
    return torch.tensor(rows, dtype=torch.int64)
