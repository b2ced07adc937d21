"""The access log: each request when its answer has ended, with what it cost, and without what is secret."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from quire.app.logs import BackgroundHandler
from quire.tracing.sdk import OpenTelemetry
from quire.tracing.tracing import Tracing
from tests.support.fake_core import FakeCore, says
from tests.support.raw import connected, on_uvloop
from tests.support.realtime import speech_server
from tests.support.server import running_server, until
from tests.support.traces import Trees

COMPLETIONS = "/v1/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Prepared(BackgroundHandler):
    """Keeps messages as they would be written."""

    def __init__(self) -> None:
        super().__init__(descriptor=-1)
        self.records: list[logging.LogRecord] = []

    @override
    def enqueue(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def access(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.access")


def entries(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the logged requests, with their ids."""
    records = [record for record in caplog.records if record.name == "quire.access"]
    return [{**record.__dict__["fields"], "request_id": record.__dict__["request_id"]} for record in records]


async def test_requests_are_logged_with_their_tokens_and_probes_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_server(tmp_path) as server:
        for stream in (False, True):
            body = {"prompt": ["abc", "d"], "max_tokens": 2, "stream": stream}
            await server.post(COMPLETIONS, body, headers={"x-request-id": "mine"})
        for path in ("/health", "/ready", "/ping", "/metrics"):
            await server.http.get(path)
        await server.http.get("/v1/models")
        await until(lambda: len(entries(caplog)) == 3)
    *generated, listed = entries(caplog)
    for entry in generated:
        assert (entry["method"], entry["path"], entry["status"], entry["request_id"]) == (
            "POST",
            COMPLETIONS,
            200,
            "mine",
        )
        assert (entry["prompt_tokens"], entry["cached_tokens"], entry["output_tokens"]) == (4, 0, 4)
        assert 0 <= entry["ttft_ms"] <= entry["duration_ms"]
        assert entry["client"].startswith("127.0.0.1:")
    assert (listed["path"], listed["status"], "prompt_tokens" in listed) == ("/v1/models", 200, False)
    line = caplog.records[0].getMessage()
    assert f'"POST {COMPLETIONS} HTTP/1.1" 200, in ' in line
    assert line.endswith("4 + 4 tokens")


async def test_what_is_refused_before_its_endpoint_has_the_ids_of_its_own_span(tmp_path: Path) -> None:
    trees, log = Trees(), Prepared()
    logging.getLogger("quire.access").addHandler(log)
    tracing = Tracing(OpenTelemetry(), trees)
    async with running_server(tmp_path, api_key=("k",), tracing=tracing) as server:
        assert (await server.http.get("/v1/models", headers={"traceparent": PARENT})).status_code == 401
        await until(lambda: log.records)
    logging.getLogger("quire.access").removeHandler(log)
    ((request,), (record,)) = trees.requests, log.records
    assert (record.__dict__["trace_id"], record.__dict__["span_id"]) == (TRACE, request.context.span_id)


async def test_other_paths_can_be_left_out_and_all_be_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_server(tmp_path, disable_access_log_for_endpoints=("/v1/models",)) as server:
        await server.http.get("/v1/models")
        await server.http.get("/health")
        await server.http.get("/version")
        await until(lambda: len(entries(caplog)) == 2)
    assert [entry["path"] for entry in entries(caplog)] == ["/health", "/version"]
    caplog.clear()
    async with running_server(tmp_path, access_log=False) as server:
        await server.http.get("/v1/models")
    assert not entries(caplog)


async def test_nothing_of_a_client_looks_like_a_line_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_server(tmp_path, api_key=("secret-key",)) as server:
        headers = {"authorization": "Bearer secret-key"}
        await server.http.get("/v1/%0A2026-01-01%20INFO%20forged%1B[2J?api_key=secret-key", headers=headers)
        await server.http.get(f"/{'x' * 1000}", headers=headers)
        await until(lambda: len(entries(caplog)) == 2)
    assert "secret-key" not in caplog.text
    forged, long = entries(caplog)
    assert forged["path"] == "/v1/%0A2026-01-01%20INFO%20forged%1B%5B2J"
    assert len(long["path"]) == 256


async def test_clients_that_leave_are_told_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    core = FakeCore(answer=says("x" * 400))
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        core.allow(1)
        async with server.http.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True}) as answer:
            await anext(answer.aiter_bytes())
        await until(lambda: entries(caplog))
    (entry,) = entries(caplog)
    assert (entry["status"], entry["client_left"], entry["output_tokens"]) == (200, True, 1)


@on_uvloop
async def test_what_the_parser_refuses_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_server(tmp_path) as server, connected(server) as client:
        await client.send("GET / HTTP/1.1\r\nX-Request-Id: mine\r\n" + "a: b\r\n" * 300)
        assert (await client.answer()).status == 431
        (entry,) = entries(caplog)
    assert (entry["status"], entry["request_id"]) == (431, "mine")
    assert "--max-header-count" in entry["error"]


async def test_realtime_sessions_are_logged_when_they_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from websockets.asyncio.client import connect

    async with speech_server(tmp_path) as server:
        url = f"{server.url.replace('http', 'ws')}/v1/realtime?model=fake"
        async with connect(url):
            assert not entries(caplog)
        await until(lambda: entries(caplog))
    (entry,) = entries(caplog)
    assert (entry["method"], entry["path"], entry["status"]) == ("WEBSOCKET", "/v1/realtime", 101)
