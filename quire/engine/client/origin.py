"""Origin: the HTTP request, or the session, for which the engine gets a request. A property of the current task."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from quire.engine.client.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Origin:
    """Where requests to the engine come from.

    Attributes:
        request_id: id of the HTTP request, which its response has as well; empty outside of requests.
        traceparent: the header of this name (W3C Trace Context) as the client has sent it; None if there is none.
        arrived: monotonic seconds when its head had been read; 0 outside of requests.
        timeline: where its time went, so far.
    """

    request_id: str = ""
    traceparent: str | None = None
    arrived: float = 0.0
    timeline: Timeline = field(default_factory=Timeline, compare=False, repr=False)


_NOWHERE = Origin()
_origin: ContextVar[Origin] = ContextVar("origin", default=_NOWHERE)


def set_current_origin(origin: Origin) -> None:
    """Set the origin of the current task's requests."""
    _origin.set(origin)


def current_origin() -> Origin:
    """Return the origin of the current task's requests."""
    return _origin.get()
