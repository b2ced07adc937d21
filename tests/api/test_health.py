"""/health, /ready, /version and /load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.engine.client import engine_client as client_module
from tests.support.fake_core import FakeCore, says
from tests.support.server import chunks_of, running_server, until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = {"prompt": "x", "max_tokens": 400}


async def test_health_is_green_then_red_when_the_engine_dies(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 400), die_at_step=20)
    async with running_server(tmp_path, core) as server:
        for path in ("/health", "/ping", "/ready"):
            answer = await server.http.get(path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert (await server.http.head(path)).status_code == 200
        assert (await server.http.post("/ping")).status_code == 200
        core.hold.set()
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        bodies = ((COMPLETIONS, {**LONG, "stream": True}), (CHAT, chat), (COMPLETIONS, LONG))
        tasks = [asyncio.create_task(server.post(path, body)) for path, body in bodies]
        await until(lambda: len(core.active) == 3)
        core.hold.clear()
        answers = [await task for task in tasks]
        for answer in answers[:2]:
            assert answer.status_code == 200
            last = chunks_of(answer.text)[-1]
            assert "told to die" in last["error"]["message"]
            assert last["error"]["code"] == 503
        assert answers[2].status_code == 503
        for path in ("/health", "/ping", "/ready"):
            answer = await server.http.get(path)
            assert answer.status_code == 503
            assert "told to die" in answer.json()["error"]["message"]
        assert (await server.post(COMPLETIONS, LONG)).status_code == 503


async def test_probes_have_the_headers_and_the_methods_of_other_endpoints(tmp_path: Path) -> None:
    orca = {"endpoint-load-metrics-format": "TEXT"}
    async with running_server(tmp_path, allowed_origins=("https://a.example",), max_body_size=1000) as server:
        for path in ("/health", "/ping", "/ready"):
            for method in ("GET", "HEAD", *["POST"] * (path == "/ping")):
                headers = {"x-request-id": "mine", "origin": "https://a.example", **orca}
                answer = await server.http.request(method, path, headers=headers, content=b"x" * 100)
                assert (answer.status_code, answer.content) == (200, b""), (method, path)
                assert answer.headers["x-request-id"] == "mine"
                assert answer.headers["content-length"] == "0"
                assert answer.headers["access-control-allow-origin"] == "https://a.example"
                assert answer.headers["endpoint-load-metrics"].startswith("TEXT ")
                assert len((await server.http.request(method, path)).headers["x-request-id"]) == 32
                assert (await server.http.request(method, path, content=b"x" * 2000)).status_code == 413
            for method in ("DELETE", "PUT", *["POST"] * (path != "/ping")):
                answer = await server.http.request(method, path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (405, 405), (method, path)
            preflight = {"origin": "https://a.example", "access-control-request-method": "GET"}
            assert (await server.http.options(path, headers=preflight)).status_code == 200
        schema = (await server.http.get("/openapi.json")).json()["paths"]
        assert {path: set(schema[path]) for path in ("/health", "/ping", "/ready")} == {
            "/health": {"get"},
            "/ping": {"get", "post"},
            "/ready": {"get"},
        }
        assert 'handler="/health"' not in (await server.http.get("/metrics")).text


async def test_an_unhealthy_server_says_why_to_every_probe(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        server.state.degraded.append(lambda: "the store is broken")
        for path in ("/health", "/ping", "/ready"):
            answer = await server.http.get(path)
            assert (answer.status_code, answer.json()) == (
                200,
                {"status": "degraded", "reasons": ["the store is broken"]},
            )
            assert (await server.http.head(path)).content == b""
        server.state.models[0].client.fail("told to die")
        for method, path in (("GET", "/health"), ("HEAD", "/health"), ("POST", "/ping"), ("GET", "/ready")):
            answer = await server.http.request(method, path)
            assert answer.status_code == 503
            if method == "HEAD":
                assert answer.content == b""
            else:
                assert "told to die" in answer.json()["error"]["message"]


async def test_a_stuck_engine_is_unhealthy_until_it_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_PING_EVERY", 0.01)
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        assert (await server.http.get("/health")).status_code == 200
        server.state.stall_timeout = 0.3  # only now: on a busy machine an answer to a ping may take as long
        core.deaf.set()
        async with asyncio.timeout(60):
            while (answer := await server.http.get("/health")).status_code == 200:
                await asyncio.sleep(0.02)
        assert "no progress" in answer.json()["error"]["message"]
        core.deaf.clear()
        async with asyncio.timeout(60):
            while (await server.http.get("/health")).status_code != 200:
                await asyncio.sleep(0.02)


async def test_a_draining_server_is_not_ready_but_healthy(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        server.state.draining = True
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.http.get("/health")).status_code == 200


async def test_version_and_load(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        assert set((await server.http.get("/version")).json()) == {"version"}
        assert (await server.http.get("/load")).json() == {"server_load": 0}
        task = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "x"}))
        await until(lambda: core.active)
        assert (await server.http.get("/load")).json() == {"server_load": 1}
        core.hold.clear()
        await task
        assert (await server.http.get("/load")).json() == {"server_load": 0}
