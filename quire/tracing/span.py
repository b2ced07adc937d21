"""Span: something that took time, with its parts, before it is turned into OpenTelemetry's spans."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from quire.engine.client.trace_context import TraceContext

AttributeValue = str | int | float | tuple[str, ...]
Attributes = dict[str, AttributeValue]
SpanKind = Literal["server", "internal"]


class Span(msgspec.Struct, array_like=True):
    """A part of a trace. Times are monotonic seconds.

    Attributes:
        link: a span that it belongs to without being part of it.
        failed: its status is ERROR.
    """

    name: str
    began: float
    ended: float
    attributes: Attributes = {}
    children: list[Span] = []
    kind: SpanKind = "internal"
    link: TraceContext | None = None
    failed: bool = False

    @property
    def count(self) -> int:
        """The number of spans: itself, and all of its parts."""
        return 1 + sum([child.count for child in self.children])


class SpanTree(msgspec.Struct, frozen=True, array_like=True, tag="tree"):
    """A span that has ended, with all of its parts.

    Attributes:
        context: its ids.
        parent: the span that it is a part of.
        wall_offset: nanoseconds from monotonic time to that of the day.
    """

    context: TraceContext
    parent: TraceContext | None
    wall_offset: int
    span: Span

    @property
    def count(self) -> int:
        """The number of spans."""
        return self.span.count


class SpanSource(Protocol):
    """A message of which spans are made where they are exported."""

    @property
    def count(self) -> int:
        """The number of spans."""


class SpanQueue(Protocol):
    """Takes spans that have ended."""

    def put(self, source: SpanSource) -> None:
        """Export the spans, or drop them. Does not wait."""
