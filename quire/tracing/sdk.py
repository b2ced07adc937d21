"""OpenTelemetry's SDK: which requests are sampled, and ids."""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from typing_extensions import override

from quire.engine.client.trace_context import TraceContext
from quire.tracing.span import Attributes
from quire.tracing.tracing import Sampler


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
            around = set_span_in_context(NonRecordingSpan(_span_context(parent)), around)
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


def _span_context(context: TraceContext) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else None
    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), True, flags, state)
