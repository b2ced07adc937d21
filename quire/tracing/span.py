"""Span: something that took time, with its parts, before it is turned into OpenTelemetry's spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from quire.engine.client.trace_context import TraceContext

AttributeValue = str | int | float | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]
SpanKind = Literal["server", "internal"]


@dataclass(slots=True)
class Span:
    """A part of a trace. Times are monotonic seconds.

    Attributes:
        link: a span that it belongs to without being part of it.
        failed: its status is ERROR.
    """

    name: str
    began: float
    ended: float
    attributes: Attributes = field(default_factory=dict)
    children: list[Span] = field(default_factory=list)
    kind: SpanKind = "internal"
    link: TraceContext | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class SpanTree:
    """A span that has ended, with all of its parts. They are made where they are exported.

    Attributes:
        context: its ids.
        parent: the span that it is a part of.
        wall_offset: nanoseconds from monotonic time to that of the day.
        most_spans: as many spans as it may have.
        build: makes it.
    """

    context: TraceContext
    parent: TraceContext | None
    wall_offset: int
    most_spans: int
    build: Callable[[], Span]


class SpanQueue(Protocol):
    """Takes spans that have ended."""

    def put(self, tree: SpanTree) -> None:
        """Export the spans, or drop them. Does not wait."""
