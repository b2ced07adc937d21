"""TraceContext: the place of a request in a distributed trace, as in the headers of W3C Trace Context."""

from __future__ import annotations

import re
from typing import Self

import msgspec

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MOST_STATE = 512  # characters of tracestate that have to be passed on; a longer one is dropped
_SAMPLED = 1


class TraceContext(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A span, as others refer to it.

    Attributes:
        trace_id: 32 hexadecimal digits, which all spans of the trace have.
        span_id: 16 hexadecimal digits.
        sampled: the spans of the trace are exported.
        state: the header `tracestate`, which vendors of tracing systems use; may be empty.
    """

    trace_id: str
    span_id: str
    sampled: bool = True
    state: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> Self | None:
        """Read the headers of a request; None if `traceparent` is not valid."""
        match = _PARENT.fullmatch(traceparent.strip())
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
            return None
        state = tracestate if len(tracestate) <= _MOST_STATE else ""
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state)

    @property
    def traceparent(self) -> str:
        """The value of the header of this name."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers with which requests to other servers carry it on."""
        state = {"tracestate": self.state} if self.state else {}
        return {"traceparent": self.traceparent, **state}
