"""Traces of `quire serve`, as its flags and variables ask for them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.otlp import grpc_receiver
from tests.support.process import failing, serving, tiny_model

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("flags", [(), pytest.param(("--engine-process",), marks=pytest.mark.slow)])
def test_a_served_request_has_a_trace_with_the_steps_of_its_engine(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with grpc_receiver() as receiver:
        details = ("--otlp-traces-endpoint", receiver.endpoint, "--collect-detailed-traces", "model,worker")
        with serving(str(tiny_model(tmp_path)), *flags, *details, env={"OTEL_SERVICE_NAME": "mine"}) as server:
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
            with server.http as client:
                answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4}, headers=headers)
            assert answer.status_code == 200, answer.text
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait() == 0, server.log
        receiver.check()
        root, children = receiver.tree()
        assert (root.parent_id, root.service["service.name"]) == (SPAN, "mine")
        (engine,) = (span for span in children[root.span_id] if span.name == "engine")
        assert engine.service["service.name"] == "mine"
        assert [span.name for span in children[engine.span_id]] == ["prefill_chunk", "decode_steps"]
        assert "trace_spans_dropped" not in server.log


@pytest.mark.slow  # processes that say what the tests of settings see
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "expects grpc or http/protobuf, not 'http/json'"),
        ("OTEL_TRACES_EXPORTER", "console", "OTEL_TRACES_EXPORTER expects otlp or none, not 'console'"),
    ],
)
def test_a_variable_with_another_value_is_an_error_at_start(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317")
    assert f"quire serve: {variable} expects" in (error := failing())
    assert message in error


def test_steps_cannot_be_traced_without_a_collector() -> None:
    output = failing("--collect-detailed-traces", "all")
    assert "quire serve: --collect-detailed-traces needs --otlp-traces-endpoint" in output
