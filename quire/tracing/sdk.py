"""OpenTelemetry's SDK: which requests are sampled, and ids."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_OFF, DEFAULT_ON, Decision
from opentelemetry.sdk.trace.sampling import Sampler as SpanSampler
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

# Samplers that decide as the client does, and what they decide for requests without one. Known here as asking them
# takes longer than everything else that is done when a request arrives.
_FOLLOWERS: Final[dict[SpanSampler, bool]] = {DEFAULT_ON: True, DEFAULT_OFF: False}
_ID_BITS, _SPAN_DIGITS = 192, 16  # of a trace and its first span


class OpenTelemetry(Sampler):
    """Follow the variables of the SDK for its sampler."""

    def __init__(self) -> None:
        """Read the variables.

        Raises:
            ValueError: one is not valid.
        """
        provider = TracerProvider(shutdown_on_exit=False)
        self._sampler, self._ids = provider.sampler, provider.id_generator
        self._without_parent = _FOLLOWERS.get(provider.sampler)
        self._has_random_ids = type(self._ids) is RandomIdGenerator

    @override
    def begin(self, parent: TraceContext | None, attributes: Callable[[], Attributes]) -> TraceContext:
        if self._without_parent is None or (parent is not None and parent.state):
            return self._ask(parent, attributes())
        if parent is not None:
            return self._new(parent.trace_id, parent.sampled)
        if self._has_random_ids:
            ids = f"{random.getrandbits(_ID_BITS):0{_ID_BITS // 4}x}"  # one of zeros is less likely than any fault
            return TraceContext(ids[_SPAN_DIGITS:], ids[:_SPAN_DIGITS], self._without_parent)
        return self._new(f"{self._ids.generate_trace_id():032x}", self._without_parent)

    @override
    def child(self, parent: TraceContext) -> TraceContext:
        return self._new(parent.trace_id, True, parent.state)

    def _ask(self, parent: TraceContext | None, attributes: Attributes) -> TraceContext:
        """Have the sampler decide."""
        around = Context()
        if parent is None:
            trace_id = self._ids.generate_trace_id()
        else:
            trace_id = int(parent.trace_id, 16)
            around = set_span_in_context(NonRecordingSpan(_span_context(parent)), around)
        result = self._sampler.should_sample(around, trace_id, "", SpanKind.SERVER, attributes)
        state = result.trace_state.to_header() if result.trace_state else ""
        return self._new(f"{trace_id:032x}", result.decision is Decision.RECORD_AND_SAMPLE, state)

    def _new(self, trace_id: str, sampled: bool, state: str = "") -> TraceContext:
        return TraceContext(trace_id, f"{self._ids.generate_span_id():016x}", sampled, state)


def _span_context(context: TraceContext) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else None
    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), True, flags, state)
