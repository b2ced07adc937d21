"""Metrics of OpenTelemetry's conventions for generative AI (`gen_ai.server.*`), which are sent over OTLP alone."""

from __future__ import annotations

from opentelemetry.metrics import Meter
from typing_extensions import override

from quire.engine.client.records import Observer, RequestRecord

# The boundaries that the conventions recommend.
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_OPERATIONS = {
    "generate": "chat",
    "pool": "embeddings",
}  # by the kind of a request to the engine, if nothing else tells


class GenAiInstruments:
    """The instruments, which all models of a server share."""

    def __init__(self, meter: Meter) -> None:
        """`meter`: makes them."""
        self.duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            unit="s",
            description="Time from a request's arrival at the engine to its end",
            explicit_bucket_boundaries_advisory=_DURATION,
        )
        self.time_to_first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            unit="s",
            description="Time from a request's arrival at the engine to its first token",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN,
        )
        self.time_per_output_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            unit="s",
            description="Mean time per output token of a request, without the first token",
            explicit_bucket_boundaries_advisory=_PER_TOKEN,
        )


class GenAiMetrics(Observer):
    """Records the metrics of one model."""

    def __init__(self, instruments: GenAiInstruments, model_name: str) -> None:
        self._instruments = instruments
        self._attributes = {
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": model_name,
            "gen_ai.response.model": model_name,
        }

    @override
    def on_finish(self, record: RequestRecord) -> None:
        if record.is_search_step:
            return
        times = record.times
        operation = record.origin.notes.operation or _OPERATIONS[record.kind]
        attributes = {**self._attributes, "gen_ai.operation.name": operation}
        has_failed = record.finish_reason == "error"
        ended = {**attributes, "error.type": "_OTHER"} if has_failed else attributes
        self._instruments.duration.record(times.sent - times.queued, ended)
        if has_failed or not times.first_token:
            return
        self._instruments.time_to_first_token.record(times.first_token - times.queued, attributes)
        if record.output_tokens > 1:
            decode = times.last_token - times.first_token
            self._instruments.time_per_output_token.record(decode / (record.output_tokens - 1), attributes)
