"""RequestTrace: what is known of a request that is traced. Nothing in it has a size that a client chooses.

It is a message to the process that exports spans, which makes them of it: while a request is answered, nothing is done
for its trace but to keep what would be gone later.
"""

from __future__ import annotations

import time
from operator import attrgetter
from typing import TYPE_CHECKING, Self

import msgspec

from quire.engine.client.origin import RequestNotes
from quire.engine.client.timeline import RequestTimes
from quire.engine.client.trace_context import TraceContext
from quire.tracing.span import Attributes, SpanKind

if TYPE_CHECKING:  # they import numpy, which the process that exports spans does not need
    from quire.engine.client.records import RequestRecord
    from quire.engine.client.sampling_params import SamplingParams

_FIRST, _LAST = 8, 8  # of its sequences that have spans


class RequestHead(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What the head of a request says.

    Attributes:
        method: of HTTP; empty for an utterance of a realtime session, which has nothing but the id.
        client: its address.
        user_agent, host: values of headers; None without them.
    """

    request_id: str
    method: str = ""
    path: str = ""
    scheme: str = ""
    client: str = ""
    user_agent: bytes | None = None
    host: bytes | None = None

    def attributes(self) -> Attributes:
        """Return them by their names in the conventions."""
        if not self.method:
            return {"gen_ai.request.id": self.request_id}
        attributes: Attributes = {
            "http.request.method": self.method,
            "url.path": self.path,
            "url.scheme": self.scheme,
            "gen_ai.request.id": self.request_id,
        }
        if self.client:
            attributes["client.address"] = self.client
        if self.user_agent is not None:
            attributes["user_agent.original"] = self.user_agent.decode("latin-1")
        if self.host is not None:
            attributes |= _address(self.host.decode("latin-1"))
        return attributes


class RequestParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The sampling parameters that spans tell; see `SamplingParams`."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    frequency_penalty: float
    presence_penalty: float

    @classmethod
    def of(cls, params: SamplingParams) -> Self:
        """Return those of a sequence."""
        return cls(*_params_fields(params))

    def attributes(self) -> Attributes:
        """Return them by their names in the conventions; those that have no effect are left out."""
        attributes: Attributes = {
            "gen_ai.request.max_tokens": self.max_tokens,
            "gen_ai.request.temperature": self.temperature,
            "gen_ai.request.top_p": self.top_p,
        }
        if self.top_k:
            attributes["gen_ai.request.top_k"] = self.top_k
        if self.seed is not None:
            attributes["gen_ai.request.seed"] = self.seed
        if self.frequency_penalty:
            attributes["gen_ai.request.frequency_penalty"] = self.frequency_penalty
        if self.presence_penalty:
            attributes["gen_ai.request.presence_penalty"] = self.presence_penalty
        return attributes


_params_fields = attrgetter(*RequestParams.__struct_fields__)


class SequenceTrace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that has ended; see `RequestRecord`."""

    kind: str
    times: RequestTimes
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    answers: int
    least_cached: int
    prefill_chunks: int
    draft_tokens: int
    accepted_tokens: int
    preemptions: int
    error: str

    @classmethod
    def of(cls, record: RequestRecord) -> Self:
        """What spans need of a record."""
        return cls(*_record_fields(record))

    @property
    def phases(self) -> int:
        """The number of spans that tell what it went through."""
        return 1 + (self.times.scheduled > 0) + (self.times.first_token > 0)


_record_fields = attrgetter(*SequenceTrace.__struct_fields__)


class Totals(msgspec.Struct, array_like=True, gc=False):
    """Numbers of several sequences of a request.

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
    finish_reasons: list[str] = []
    error: str = ""
    times: RequestTimes = msgspec.field(default_factory=RequestTimes)

    def add(self, sequence: SequenceTrace) -> None:
        """Count a sequence."""
        self.sequences += 1
        self._add_finish_reason(sequence.finish_reason)
        self._add(sequence)

    def add_search_step(self, step: SequenceTrace) -> None:
        """Count a step of a beam search. The prompt is that of the first; others have the beam so far."""
        if not self.search_steps:
            self.input_tokens, self.cached_tokens = step.prompt_tokens, step.cached_tokens
        self.search_steps += 1
        self._add(step)

    def include(self, others: Totals) -> None:
        """Add the numbers of other sequences, which have ended later."""
        self.sequences += others.sequences
        self.search_steps += others.search_steps
        self.input_tokens += others.input_tokens
        self.cached_tokens += others.cached_tokens
        self.output_tokens += others.output_tokens
        for reason in others.finish_reasons:
            self._add_finish_reason(reason)
        self.error = self.error or others.error
        self._add_times(others.times)

    def _add(self, sequence: SequenceTrace) -> None:
        self.output_tokens += sequence.output_tokens
        if sequence.kind == "pool" or sequence.answers:
            self.input_tokens += sequence.prompt_tokens
            self.cached_tokens += sequence.cached_tokens if sequence.kind == "pool" else sequence.least_cached
        self.error = self.error or sequence.error
        self._add_times(sequence.times)

    def _add_finish_reason(self, reason: str) -> None:
        if reason not in self.finish_reasons:
            self.finish_reasons.append(reason)

    def _add_times(self, part: RequestTimes) -> None:
        whole = self.times
        whole.queued = _earliest(whole.queued, part.queued)
        whole.scheduled = _earliest(whole.scheduled, part.scheduled)
        whole.first_token = _earliest(whole.first_token, part.first_token)
        whole.last_token = max(whole.last_token, part.last_token)
        whole.sent = max(whole.sent, part.sent)


class RequestTrace(msgspec.Struct, kw_only=True, array_like=True, gc=False, tag="request"):
    """A request, a realtime session or an utterance in one, from its arrival on.

    Attributes:
        context: its own span.
        parent: the span of the client that it is part of.
        link: a span that it belongs to without being part of it: the session of an utterance.
        notes: what the front end has learnt about it.
        began, ended: monotonic seconds.
        wall_offset: nanoseconds from monotonic time to that of the day.
        head: what its head says; None if it is a part of a request that had ended before.
        route: the template of its path; empty if there is none.
        status: of the HTTP response; None if there was none.
        error: the class of the error that ended it although its response had begun, or why it has no whole response.
        failed: that is the server's fault.
        model: name of the model that ran it.
        params: sampling parameters that its first sequence had.
        sequences: those that have spans: the first ones to end, and behind them the last ones.
        others: numbers of the sequences behind the first ones, and of the steps of a beam search; None without any.
    """

    context: TraceContext
    parent: TraceContext | None = None
    link: TraceContext | None = None
    kind: SpanKind = "server"
    notes: RequestNotes
    began: float
    ended: float = 0.0
    wall_offset: int = 0
    head: RequestHead | None = None
    route: str = ""
    status: int | None = None
    error: str = ""
    failed: bool = False
    model: str = ""
    params: RequestParams | None = None
    sequences: list[SequenceTrace] = []
    others: Totals | None = None

    def add(self, record: RequestRecord, model: str) -> None:
        """Take note of a sequence that has ended."""
        if not self.model:
            self.model = model
            self.params = None if record.params is None else RequestParams.of(record.params)
        sequence = SequenceTrace.of(record)
        if not record.is_search_step and len(self.sequences) < _FIRST:
            self.sequences.append(sequence)
            return
        if self.others is None:
            self.others = Totals()
        if record.is_search_step:
            self.others.add_search_step(sequence)
            return
        self.others.add(sequence)
        if len(self.sequences) == _FIRST + _LAST:
            del self.sequences[_FIRST]
        self.sequences.append(sequence)

    def end(self, now: float) -> None:
        """Take note of its end."""
        self.ended = now
        self.wall_offset = time.time_ns() - time.monotonic_ns()

    def totals(self) -> Totals:
        """Return the numbers of all sequences."""
        totals = Totals()
        for sequence in self.sequences[:_FIRST]:
            totals.add(sequence)
        if self.others is not None:
            totals.include(self.others)
        return totals

    @property
    def has_one_sequence(self) -> bool:
        """Whether its phases are those of its only sequence."""
        return len(self.sequences) == 1 and self.others is None

    @property
    def count(self) -> int:
        """The number of spans that `request_span` makes of it."""
        if self.has_one_sequence:
            times, count = self.sequences[0].times, 1 + self.sequences[0].phases
        else:
            totals = self.totals()
            times, count = totals.times, 1 + (totals.search_steps > 0)
            count += sum([1 + sequence.phases for sequence in self.sequences])
        activities = self.notes.activities
        queued = times.queued or self.ended
        before = sum([activity.began < queued for activity in activities])
        count += len(activities) - before
        if self.kind == "server":
            count += before + (times.queued > 0 or before > 0)
            count += times.last_token > 0 or times.sent > 0
        return count


def _earliest(first: float, second: float) -> float:
    """Return the earlier of two times, of which 0 is none."""
    return min(first, second) if first and second else first or second


def _address(host: str) -> Attributes:
    """The server as the client has named it, with its port if that has one."""
    name, colon, port = host.rpartition(":")
    if colon and port.isascii() and port.isdigit():
        return {"server.address": name.strip("[]"), "server.port": int(port)}
    return {"server.address": host.strip("[]")}
