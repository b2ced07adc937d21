"""Metrics over OTLP: what a collector gets, and what becomes of one that is down."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.config.command import ConfigError
from quire.config.commands import Serve
from quire.engine.client.origin import Origin, RequestNotes
from quire.engine.client.protocol import FinishReason, StepStats
from quire.engine.client.records import RequestRecord
from quire.engine.client.timeline import RequestTimes
from quire.metrics.gen_ai import GenAiMetrics
from quire.metrics.model_metrics import ModelMetrics
from quire.metrics.otlp import OtlpExport
from quire.metrics.prometheus import Metrics
from quire.otlp.settings import Collector as Target
from quire.otlp.settings import MetricSettings, OtlpSettingsError, Protocol
from tests.support.server import listening, until

LABELS = {"model_name": "model", "engine": "0"}
SECONDS = ("queued", "scheduled", "first_token", "last_token", "sent")


def record(finish_reason: FinishReason = "stop", operation: str = "") -> RequestRecord:
    """A request with 5 tokens, of which the first came after 0.3 s and the last after 2.3 s."""
    times = RequestTimes(queued=10.0, scheduled=10.1, first_token=10.3, last_token=12.3, sent=12.5)
    return RequestRecord(
        request_id="one",
        origin=Origin(notes=RequestNotes(operation)),
        kind="generate",
        times=times,
        finish_reason=finish_reason,
        prompt_tokens=7,
        cached_tokens=0,
        output_tokens=5,
        max_tokens=5,
    )


class Collector:
    """Keeps the messages that it gets."""

    def __init__(self) -> None:
        self.messages: list[ExportMetricsServiceRequest] = []

    @property
    def latest(self) -> dict[str, Any]:
        """The metrics of the last message by name."""
        scopes = self.messages[-1].resource_metrics[0].scope_metrics
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a message over HTTP, as an ASGI app."""
        request = Request(scope, receive)
        assert (request.method, request.url.path) == ("POST", "/v1/metrics")
        self.messages.append(ExportMetricsServiceRequest.FromString(await request.body()))
        response = Response(ExportMetricsServiceResponse().SerializeToString(), media_type="application/x-protobuf")
        await response(scope, receive, send)


class Servicer(MetricsServiceServicer):
    """Takes messages over gRPC."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector

    def Export(  # noqa: N802 the name of the service
        self, request: ExportMetricsServiceRequest, context: object
    ) -> ExportMetricsServiceResponse:
        self.collector.messages.append(request)
        return ExportMetricsServiceResponse()


@contextmanager
def grpc_server(collector: Collector) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    add_MetricsServiceServicer_to_server(Servicer(collector), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@asynccontextmanager
async def collecting(protocol: Protocol) -> AsyncIterator[tuple[Collector, MetricSettings]]:
    """A collector, and the settings with which metrics are sent to it."""
    collector = Collector()
    if protocol == "grpc":
        with grpc_server(collector) as url:
            yield collector, MetricSettings(Target(url), interval=0.05)
    else:
        async with listening(collector) as url:
            yield collector, MetricSettings(Target(f"{url}/v1/metrics", protocol), interval=0.05)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_collector_gets_all_metrics_under_their_names(protocol: Protocol) -> None:
    metrics = Metrics(max_model_len=100, vllm_names=True)
    model = ModelMetrics(metrics, "model", 0)
    async with collecting(protocol) as (collector, settings):
        export = OtlpExport(metrics.collect, settings)
        gen_ai = GenAiMetrics(export.gen_ai, "model")
        export.start()
        await until(lambda: collector.messages)  # also before the first request
        model.on_step(StepStats(running=2))
        for observer in (model, gen_ai):
            observer.on_finish(record())
            observer.on_finish(record("error"))
        await export.close()
        latest = collector.latest
    for prefix in ("quire", "vllm"):
        (point,) = latest[f"{prefix}:num_requests_running"].gauge.data_points
        assert point.as_double == 2
        assert {item.key: item.value.string_value for item in point.attributes} == LABELS
        total = latest[f"{prefix}:prompt_tokens_total"].sum
        assert total.is_monotonic
        assert total.data_points[0].as_double == 14
        (point,) = latest[f"{prefix}:e2e_request_latency_seconds"].histogram.data_points
        assert (point.count, point.sum) == (2, 5.0)
        assert list(point.explicit_bounds)[-1] == 7680
        assert sum(point.bucket_counts) == 2
        assert point.bucket_counts[list(point.explicit_bounds).index(2.5)] == 2
    assert "process_cpu_seconds_total" in latest
    resource = {
        item.key: item.value.string_value for item in collector.messages[-1].resource_metrics[0].resource.attributes
    }
    assert resource["service.name"] == "quire"
    assert resource["service.instance.id"] == settings.instance


async def test_the_metrics_of_the_conventions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "answers")
    async with collecting("http/protobuf") as (collector, settings):
        export = OtlpExport(lambda: (), settings)
        gen_ai = GenAiMetrics(export.gen_ai, "model")
        export.start()
        gen_ai.on_finish(record())
        gen_ai.on_finish(record("error", "text_completion"))
        await export.close()
        latest = collector.latest
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "quire"}
    attributes |= {"gen_ai.request.model": "model", "gen_ai.response.model": "model"}
    durations = latest["gen_ai.server.request.duration"]
    assert durations.unit == "s"
    seen = [
        {item.key: item.value.string_value for item in point.attributes} for point in durations.histogram.data_points
    ]
    assert sorted(seen, key=len) == [
        attributes,
        {**attributes, "gen_ai.operation.name": "text_completion", "error.type": "_OTHER"},
    ]
    assert list(durations.histogram.data_points[0].explicit_bounds)[-1] == 81.92
    (first,) = latest["gen_ai.server.time_to_first_token"].histogram.data_points
    assert (first.count, round(first.sum, 6)) == (1, 0.3)
    (later,) = latest["gen_ai.server.time_per_output_token"].histogram.data_points
    assert (later.count, round(later.sum, 6)) == (1, 0.5)
    resource = {
        item.key: item.value.string_value for item in collector.messages[-1].resource_metrics[0].resource.attributes
    }
    assert resource["service.name"] == "answers"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_collector_that_is_down_does_not_hold_the_server_up(protocol: Protocol) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1/metrics"
    export = OtlpExport(lambda: (), MetricSettings(Target(url, protocol), interval=0.01, timeout=600.0))
    export.start()
    async with asyncio.timeout(60):
        await export.close()


def test_an_invalid_variable_of_the_sdk_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(OtlpSettingsError, match=r"a setting of OpenTelemetry is not valid: .*soon"):
        OtlpExport(lambda: (), MetricSettings(Target("http://127.0.0.1:1")))


def test_wrong_settings_end_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.app.serve import run

    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    with pytest.raises(ConfigError, match="quire serve: OTEL_METRICS_EXPORTER expects otlp or none, not 'console'"):
        run(Serve.parse(["--port", "0"]))
