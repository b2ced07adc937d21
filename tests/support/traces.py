"""Spans that are kept where they are made."""

from __future__ import annotations

from typing_extensions import override

from quire.tracing.requests import RequestTrace
from quire.tracing.span import Span, SpanQueue, SpanSource, SpanTree


class Trees(SpanQueue):
    """Keeps the spans, and requests of which spans would be made where they are exported."""

    def __init__(self) -> None:
        self.trees: list[SpanTree] = []
        self.requests: list[RequestTrace] = []

    @override
    def put(self, source: SpanSource) -> None:
        if isinstance(source, RequestTrace):
            self.requests.append(source)
        else:
            assert isinstance(source, SpanTree)
            self.trees.append(source)

    @property
    def spans(self) -> list[Span]:
        return [tree.span for tree in self.trees]
