"""Starts the traces of a process. Only importing this imports OpenTelemetry."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from opentelemetry.sdk.trace.export import SpanExporter

from quire.engine.client.step_observer import StepObserver
from quire.tracing.engine_spans import EngineSpans
from quire.tracing.export import SpanExport
from quire.tracing.sdk import OpenTelemetry
from quire.tracing.settings import TraceSettings, TraceSettingsError
from quire.tracing.tracing import Sampler, Tracing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningTraces:
    """Traces, and their export."""

    tracing: Tracing
    export: SpanExport
    sampler: Sampler

    def step_observer(self) -> StepObserver:
        """A new observer of an engine, which makes spans of its steps."""
        return EngineSpans(self.sampler, self.export)


def start_traces(settings: TraceSettings) -> RunningTraces:
    """Trace requests, and export what is known of them when they end.

    Raises:
        TraceSettingsError: a variable of OpenTelemetry's SDK is not valid.
    """
    try:
        sdk, exporter = OpenTelemetry(), _exporter(settings)
    except Exception as error:  # exporters have exceptions of their own for each variable
        raise TraceSettingsError(f"a setting of OpenTelemetry is not valid: {error}") from error
    export = SpanExport(exporter, sdk.spans, settings)
    return RunningTraces(Tracing(sdk, export), export, sdk)


def _exporter(settings: TraceSettings) -> SpanExporter:
    """The exporter of a protocol, which reads everything but the endpoint from its variables."""
    if settings.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc  # noqa: PLC0415 the other is not used

        return grpc.OTLPSpanExporter(endpoint=settings.endpoint)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http  # noqa: PLC0415 as above

    return http.OTLPSpanExporter(endpoint=settings.endpoint)
