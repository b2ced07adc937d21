"""Collectors that are down, slow, or refuse: requests go on, what waits is bounded, what is dropped is counted."""

from __future__ import annotations

import logging
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.engine.client.trace_context import TraceContext
from quire.metrics.prometheus import Metrics
from quire.otlp.settings import Collector, OtlpSettingsError, TraceSettings
from quire.tracing.span import Span, SpanTree
from quire.tracing.start import start_traces
from tests.support.otlp import grpc_receiver, http_receiver, traces_to
from tests.support.scrapes import values
from tests.support.server import running_server, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
CONTEXT = TraceContext(TRACE, "b7ad6b7169203331")


def tree(name: str = "one") -> SpanTree:
    return SpanTree(CONTEXT, None, 0, Span(name, 1.0, 2.0))


def exporter_process() -> psutil.Process:
    """The process that exports; those of other tests have other programs, or have ended."""
    (process,) = (
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and any("quire.tracing.exporter" in part for part in child.cmdline())
    )
    return process


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize("protocol", ["grpc", pytest.param("http/protobuf", marks=pytest.mark.slow)])
async def test_requests_go_on_while_the_collector_is_down(
    protocol: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # after which the exporter gives up
    collector = Collector(f"http://127.0.0.1:{unused_port()}", protocol)
    traces = start_traces(TraceSettings(collector, max_queue_size=20, max_batch_size=10, delay=0.02))
    async with running_server(tmp_path, tracing=traces.tracing) as server:
        for _ in range(20):
            answer = await server.post("/v1/completions", {"prompt": "ab", "stream": True})
            assert answer.status_code == 200
            assert traces.export.waiting <= 20
        await until(lambda: traces.export.dropped)
    assert traces.tracing.open_traces == 0
    with caplog.at_level(logging.WARNING):
        traces.export.close(5)
    assert not traces.export.is_running
    messages = [record.getMessage() for record in caplog.records if "quire.tracing" in record.name]
    assert sum("traces cannot be exported" in message for message in messages) <= 1
    assert f"{traces.export.dropped} spans of traces were not exported" in messages


@pytest.mark.parametrize("make", [grpc_receiver, pytest.param(http_receiver, marks=pytest.mark.slow)])
async def test_spans_that_a_collector_refuses_are_counted_and_said_once(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics(max_model_len=8, vllm_names=False)
    with make() as receiver, caplog.at_level(logging.INFO):
        receiver.refuses = True
        with traces_to(receiver, max_batch_size=1) as traces:
            traces.export.put(tree())
            await until(lambda: traces.export.dropped == 1)
            traces.export.count_drops(metrics.trace_spans_dropped.inc)
            traces.export.put(tree())
            await until(lambda: traces.export.dropped == 2)
            receiver.refuses = False
            traces.export.put(tree("taken"))
            await until(lambda: "traces are exported again" in caplog.text)
        assert [span.name for span in receiver.spans] == ["taken"]
    assert values(metrics.collect())["quire:trace_spans_dropped_total"] == 2
    messages = [record.getMessage() for record in caplog.records if record.name == "quire.tracing.export"]
    assert sum("traces cannot be exported: Failed to export" in message for message in messages) == 1
    assert "traces are exported again; 2 spans were dropped so far" in messages
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_a_slow_collector_fills_a_queue_that_is_bounded() -> None:
    with grpc_receiver() as receiver:
        receiver.hold.clear()
        with traces_to(receiver, max_queue_size=50, max_batch_size=10) as traces:
            for _ in range(10):
                traces.export.put(tree())
            await until(lambda: receiver.requests == 1)  # and gets no answer
            for _ in range(200):
                traces.export.put(tree())
            assert traces.export.waiting == 50
            assert traces.export.dropped == 150
            receiver.hold.set()
        assert len(receiver.spans) == 60


async def test_few_spans_are_sent_after_a_while() -> None:
    with grpc_receiver() as receiver, traces_to(receiver) as traces:
        traces.export.put(tree())
        await until(lambda: receiver.spans)


async def test_what_waits_at_the_end_is_exported_but_not_for_long() -> None:
    with grpc_receiver() as receiver:
        with traces_to(receiver, delay=60.0) as traces:
            for _ in range(30):
                traces.export.put(tree())
        assert len(receiver.spans) == 30
        receiver.hold.clear()
        traces = start_traces(receiver.settings(delay=60.0))
        traces.export.put(tree())
        traces.export.close(0.01)
        assert not traces.export.is_running
        traces.export.put(tree())
        assert traces.export.dropped >= 1


async def test_the_signals_of_a_supervisor_are_for_the_server_alone() -> None:
    with grpc_receiver() as receiver:
        with traces_to(receiver) as traces:
            process = exporter_process()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                process.send_signal(number)
            traces.export.put(tree())
        assert (len(receiver.spans), traces.export.dropped) == (1, 0)


async def test_a_process_that_was_killed_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    with grpc_receiver() as receiver:
        with traces_to(receiver, max_batch_size=1) as traces:
            process = exporter_process()
            process.kill()
            traces.export.put(tree("lost"))
            await until(lambda: traces.export.dropped == 1)
            traces.export.put(tree("later"))
            await until(lambda: receiver.spans)
        assert [span.name for span in receiver.spans] == ["later"]
    assert "traces cannot be exported: their process has ended" in caplog.text


def test_a_trace_that_cannot_be_made_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    with grpc_receiver() as receiver:
        with traces_to(receiver, max_batch_size=1) as traces:
            traces.export.put(SpanTree(TraceContext("none", "none"), None, 0, Span("one", 1.0, 2.0)))
            traces.export.put(tree("two"))
        assert [span.name for span in receiver.spans] == ["two"]
    assert "ValueError" in caplog.text


def test_an_invalid_variable_of_the_sdk_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(OtlpSettingsError, match=r"a setting of OpenTelemetry is not valid: .*soon"):
        start_traces(TraceSettings(Collector("http://127.0.0.1:1")))
