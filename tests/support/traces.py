"""Spans that are kept where they are made."""

from __future__ import annotations

from typing_extensions import override

from quire.tracing.span import Span, SpanQueue, SpanSource, SpanTree


class Trees(SpanQueue):
    """Keeps the spans."""

    def __init__(self) -> None:
        self.trees: list[SpanTree] = []

    @override
    def put(self, source: SpanSource) -> None:
        assert isinstance(source, SpanTree)
        self.trees.append(source)

    @property
    def spans(self) -> list[Span]:
        return [tree.span for tree in self.trees]
