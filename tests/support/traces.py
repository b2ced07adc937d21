"""Spans that are kept where they are made."""

from __future__ import annotations

from typing_extensions import override

from quire.tracing.span import Span, SpanQueue, SpanTree


class Trees(SpanQueue):
    """Keeps the spans."""

    def __init__(self) -> None:
        self.trees: list[SpanTree] = []

    @override
    def put(self, tree: SpanTree) -> None:
        self.trees.append(tree)

    @property
    def spans(self) -> list[Span]:
        return [tree.span for tree in self.trees]
