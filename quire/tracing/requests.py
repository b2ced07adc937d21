"""RequestTrace: what is known of a request that is traced. Nothing in it has a size that a client chooses."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from quire.engine.client.origin import RequestNotes
from quire.engine.client.protocol import FinishReason
from quire.engine.client.records import RequestRecord, RequestTimes
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.trace_context import TraceContext
from quire.tracing.span import Attributes, SpanKind

_FIRST, _LAST = 8, 8  # of its sequences that have spans


@dataclass(frozen=True, slots=True)
class SequenceTrace:
    """A sequence that has ended."""

    times: RequestTimes
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prefill_chunks: int
    draft_tokens: int
    accepted_tokens: int
    preemptions: int

    @classmethod
    def of(cls, record: RequestRecord) -> Self:
        """What spans need of a record."""
        return cls(
            record.times,
            record.finish_reason,
            record.prompt_tokens,
            record.cached_tokens,
            record.output_tokens,
            record.prefill_chunks,
            record.draft_tokens,
            record.accepted_tokens,
            record.preemptions,
        )


@dataclass(slots=True)
class Totals:
    """Numbers of all sequences of a request.

    Attributes:
        sequences: the number of sequences; steps of a beam search are counted in `search_steps`.
        input_tokens: of all prompts, each of which counts once.
        cached_tokens: part of them that was in the prefix cache.
        finish_reasons: of the sequences, each once.
        error: the class of the error that ended one.
        times: from the first sequence to be queued, scheduled and to get a token, to the last token and the last end.
    """

    sequences: int = 0
    search_steps: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: dict[FinishReason, None] = field(default_factory=dict)
    error: str = ""
    times: RequestTimes = field(default_factory=RequestTimes)

    def add(self, record: RequestRecord) -> None:
        """Count a sequence that has ended."""
        if record.is_search_step:
            if not self.search_steps:
                self.input_tokens, self.cached_tokens = record.prompt_tokens, record.cached_tokens
            self.search_steps += 1
        else:
            self.sequences += 1
            self.finish_reasons[record.finish_reason] = None
        self.output_tokens += record.output_tokens
        if record.kind == "pool" or record.answers:
            self.input_tokens += record.prompt_tokens
            self.cached_tokens += record.cached_tokens if record.kind == "pool" else record.least_cached
        self.error = self.error or record.error
        mine, its = self.times, record.times
        for name in ("queued", "scheduled", "first_token"):
            if value := getattr(its, name):
                setattr(mine, name, min(value, getattr(mine, name) or value))
        mine.last_token, mine.sent = max(mine.last_token, its.last_token), max(mine.sent, its.sent)


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """A request, a realtime session or an utterance in one, from its arrival on.

    Attributes:
        context: its own span.
        parent: the span of the client that it is part of.
        link: a span that it belongs to without being part of it: the session of an utterance.
        notes: what the front end has learnt about it.
        began, ended: monotonic seconds.
        wall_offset: nanoseconds from monotonic time to that of the day.
        attributes: those that are known when it arrives.
        status: of the HTTP response; None if there was none.
        error: the class of the error that ended it although its response had begun, or why it has no whole response.
        failed: that is the server's fault.
        model: name of the model that ran it.
        params: sampling parameters that its first sequence had.
        first, last: its first sequences to end, and its last ones.
    """

    context: TraceContext
    parent: TraceContext | None = None
    link: TraceContext | None = None
    kind: SpanKind = "server"
    notes: RequestNotes
    began: float
    ended: float = 0.0
    wall_offset: int = 0
    attributes: Attributes = field(default_factory=dict)
    name: str = ""
    status: int | None = None
    error: str = ""
    failed: bool = False
    model: str = ""
    params: Attributes = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    first: list[SequenceTrace] = field(default_factory=list)
    last: deque[SequenceTrace] = field(default_factory=lambda: deque(maxlen=_LAST))

    def add(self, record: RequestRecord, model: str) -> None:
        """Take note of a sequence that has ended."""
        if not self.model:
            self.model = model
            self.params = {} if record.params is None else _attributes_of(record.params)
        self.totals.add(record)
        if record.is_search_step:
            return
        (self.first if len(self.first) < _FIRST else self.last).append(SequenceTrace.of(record))

    def end(self, now: float) -> None:
        """Take note of its end."""
        self.ended = now
        self.wall_offset = time.time_ns() - time.monotonic_ns()

    @property
    def sequences(self) -> Iterator[SequenceTrace]:
        """The sequences that have spans."""
        yield from self.first
        yield from self.last


def _attributes_of(params: SamplingParams) -> Attributes:
    """Sampling parameters by their names in the conventions; those that have no effect are left out."""
    attributes: Attributes = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    if params.top_k:
        attributes["gen_ai.request.top_k"] = params.top_k
    if params.seed is not None:
        attributes["gen_ai.request.seed"] = params.seed
    if params.frequency_penalty:
        attributes["gen_ai.request.frequency_penalty"] = params.frequency_penalty
    if params.presence_penalty:
        attributes["gen_ai.request.presence_penalty"] = params.presence_penalty
    return attributes
