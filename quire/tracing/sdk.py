"""OpenTelemetry's SDK: which requests are sampled, ids, and spans in the form that exporters take."""

from __future__ import annotations

from collections.abc import Iterator

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from typing_extensions import override

from quire import __version__
from quire.engine.client.trace_context import TraceContext
from quire.otlp.service import service_of
from quire.tracing.span import Attributes, Span, SpanTree
from quire.tracing.tracing import Sampler

_SCOPE = InstrumentationScope("quire", __version__)
_KINDS = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)


class OpenTelemetry(Sampler):
    """Follow the variables of the SDK for its sampler."""

    def __init__(self) -> None:
        """Read the variables.

        Raises:
            ValueError: one is not valid.
        """
        provider = TracerProvider(shutdown_on_exit=False)
        self._sampler, self._ids = provider.sampler, provider.id_generator

    @override
    def begin(self, parent: TraceContext | None, attributes: Attributes) -> TraceContext:
        around, state = Context(), ""
        if parent is None:
            trace_id = self._ids.generate_trace_id()
        else:
            trace_id = int(parent.trace_id, 16)
            around = set_span_in_context(NonRecordingSpan(_span_context(parent, is_remote=True)), around)
        result = self._sampler.should_sample(around, trace_id, "", SpanKind.SERVER, attributes)
        if result.trace_state:
            state = result.trace_state.to_header()
        return TraceContext(
            f"{trace_id:032x}",
            f"{self._ids.generate_span_id():016x}",
            result.decision is Decision.RECORD_AND_SAMPLE,
            state,
        )

    @override
    def child(self, parent: TraceContext) -> TraceContext:
        return TraceContext(parent.trace_id, f"{self._ids.generate_span_id():016x}", True, parent.state)


class SpanMaker:
    """Make spans in the form that exporters take."""

    def __init__(self, instance: str) -> None:
        """`instance`: see `service_of`."""
        self._ids = RandomIdGenerator()
        self._resource = _HashedResource(service_of(instance))

    def spans(self, tree: SpanTree) -> list[ReadableSpan]:
        """The spans of a tree."""
        context = _span_context(tree.context)
        parent = None if tree.parent is None else _span_context(tree.parent, is_remote=tree.span.kind == "server")
        return list(self._with_children(tree.span, context, parent, tree.wall_offset))

    def _with_children(
        self, span: Span, context: SpanContext, parent: SpanContext | None, wall_offset: int
    ) -> Iterator[ReadableSpan]:
        yield ReadableSpan(
            span.name,
            context,
            parent,
            self._resource,
            span.attributes,
            links=() if span.link is None else (Link(_span_context(span.link)),),
            kind=_KINDS[span.kind],
            status=_ERROR if span.failed else _UNSET,
            start_time=int(span.began * 1e9) + wall_offset,
            end_time=int(max(span.began, span.ended) * 1e9) + wall_offset,
            instrumentation_scope=_SCOPE,
        )
        for child in span.children:
            own = SpanContext(
                context.trace_id, self._ids.generate_span_id(), False, context.trace_flags, context.trace_state
            )
            yield from self._with_children(child, own, context, wall_offset)


class _HashedResource(Resource):
    """The attributes of the service. Exporters hash them for each span, for which the SDK would write JSON."""

    def __init__(self, service: Resource) -> None:
        super().__init__(service.attributes, service.schema_url)
        self._hash = super().__hash__()

    @override
    def __hash__(self) -> int:
        return self._hash


def _span_context(context: TraceContext, *, is_remote: bool = False) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else None
    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), is_remote, flags, state)
