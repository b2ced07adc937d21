"""Origin: the HTTP request, or the session, for which the engine gets a request. A property of the current task."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgspec

from quire.engine.client.errors import RequestRefused
from quire.engine.client.timeline import Timeline
from quire.engine.client.trace_context import TraceContext

RANK_HEADER = "x-data-parallel-rank"  # vLLM's name
_LONGEST_RANK = 6  # digits
_MOST_ACTIVITIES = 32  # of a request that are noted


class Activity(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that is done for a request, from one monotonic time to another, such as fetching its media."""

    name: str
    began: float
    ended: float


class RequestNotes(msgspec.Struct, array_like=True, gc=False):
    """What the front end learns about a request while it answers it, for those who watch: traces and metrics.

    Attributes:
        operation: what it asks for, by the name of OpenTelemetry's conventions; empty if that is no work of a model, or
            its path does not tell.
        model: the name by which it asks for its model.
        answer_id: the id of its answer.
        reasoning_tokens: reasoning tokens of its answers.
        error: the class of an error that ended it after its response had begun; empty without one.
        activities: what was done for it, the first of it.
    """

    operation: str = ""
    model: str = ""
    answer_id: str = ""
    reasoning_tokens: int = 0
    error: str = ""
    activities: list[Activity] = []

    def add(self, name: str, began: float) -> None:
        """Note an activity that ends now."""
        if len(self.activities) < _MOST_ACTIVITIES:
            self.activities.append(Activity(name, began, time.monotonic()))


@dataclass(slots=True)
class Origin:
    """Where requests to the engine come from. Nothing in it changes but its trace, which it gets when it is begun.

    Attributes:
        request_id: id of the HTTP request, which its response has as well; empty outside of requests.
        client_span: the span of the client that it is a part of; None if the client says none.
        arrived: monotonic seconds when its head had been read; 0 outside of requests.
        trace: the request's own span, the parent of all others that it has here; None without tracing.
        notes: what is learnt about it.
        timeline: where its time went, so far.
        key_name: name of its API key; empty without one.
        data_parallel_rank: the replica that it asks for, as its header says; empty: any.
    """

    request_id: str = ""
    client_span: TraceContext | None = None
    arrived: float = 0.0
    trace: TraceContext | None = None
    notes: RequestNotes = field(default_factory=RequestNotes, compare=False, repr=False)
    timeline: Timeline = field(default_factory=Timeline, compare=False, repr=False)
    key_name: str = ""
    data_parallel_rank: str = ""

    @property
    def rank(self) -> int | None:
        """The replica that it asks for; None: any. `check_rank` has found it valid."""
        return int(self.data_parallel_rank) if self.data_parallel_rank else None

    @property
    def span(self) -> TraceContext | None:
        """The span that tells most of it: its own, or without tracing that of the client."""
        return self.trace or self.client_span

    @property
    def trace_headers(self) -> dict[str, str]:
        """The headers that requests to other servers have on its behalf; none without tracing."""
        return {} if self.trace is None else self.trace.headers


def check_rank(origin: Origin, ranks: range) -> None:
    """Check the replica that a request asks for.

    Raises:
        RequestRefused: it is none of the engine.
    """
    text = origin.data_parallel_rank
    if not text or (text.isascii() and text.isdecimal() and len(text) <= _LONGEST_RANK and int(text) in ranks):
        return
    accepted = str(ranks[0]) if len(ranks) == 1 else f"a number from {ranks[0]} to {ranks[-1]}"
    raise RequestRefused(f"The header {RANK_HEADER} is {text[:32]!r}, but must be {accepted}.")


_NOWHERE = Origin()
_origin: ContextVar[Origin] = ContextVar("origin", default=_NOWHERE)


def set_current_origin(origin: Origin) -> None:
    """Set the origin of the current task's requests."""
    _origin.set(origin)


def current_origin() -> Origin:
    """Return the origin of the current task's requests."""
    return _origin.get()


@contextmanager
def activity(name: str) -> Iterator[None]:
    """A context in which something is done for the current task's request, which is noted with its times."""
    began = time.monotonic()
    try:
        yield
    finally:
        current_origin().notes.add(name, began)
