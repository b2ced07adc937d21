"""Starts the traces of a process. Only importing this imports OpenTelemetry."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.client.step_observer import StepObserver
from quire.otlp.settings import OtlpSettingsError, TraceSettings
from quire.tracing.engine_spans import EngineSpans
from quire.tracing.export import SpanExport
from quire.tracing.sdk import OpenTelemetry
from quire.tracing.tracing import Sampler, Tracing


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
        OtlpSettingsError: a variable of OpenTelemetry's SDK is not valid.
    """
    try:
        sampler = OpenTelemetry()
    except ValueError as error:
        raise OtlpSettingsError(f"a setting of OpenTelemetry is not valid: {error}") from error
    export = SpanExport(settings)
    return RunningTraces(Tracing(sampler, export), export, sampler)
