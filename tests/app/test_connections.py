"""How many connections there may be, and which one is closed for a new one."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.app import connections
from quire.app.connections import Connections
from quire.config.options import ConnectionOptions
from tests.support.fake_core import FakeCore, says
from tests.support.iterations import Iterations
from tests.support.raw import Raw, connected, on_uvloop, post, silent
from tests.support.server import Server, running_server, until

HEALTH = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def many(server: Server, count: int, data: bytes | str = b"") -> AsyncIterator[list[Raw]]:
    """Connections that have been accepted, and have sent something."""
    async with AsyncExitStack() as stack:
        before = len(server.connections)
        made = [await stack.enter_async_context(connected(server)) for _ in range(count)]
        for connection in made:
            await connection.send(data)
        await until(lambda: len(server.connections) == before + count)
        yield made


@on_uvloop
async def test_too_many_requests_are_refused_but_probes_are_not(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, limit_concurrency=3) as server:
        async with many(server, 3, post({"prompt": "abc"})) as clients:
            await until(lambda: len(core.active) == 3)
            for path in ("/v1/models", "/metrics", "/v1/completions"):
                refused = await server.post(path, {"prompt": "x"})
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert "--limit-concurrency" in refused.json()["error"]["message"]
            for path in ("/health", "/ready", "/ping"):
                assert (await server.http.get(path)).status_code == 200
            core.hold.clear()
            assert [(await client.answer()).status for client in clients] == [200] * 3
        assert (await server.post("/v1/completions", {"prompt": "x"})).status_code == 200


@on_uvloop
async def test_a_new_connection_takes_the_place_of_one_without_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_RESERVE", 1)
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, limit_concurrency=5) as server, AsyncExitStack() as stack:
        halves = await stack.enter_async_context(many(server, 2, "GET /hea"))
        (running,) = await stack.enter_async_context(many(server, 1, post({"prompt": "abc"})))
        await until(lambda: core.active)
        idle = await stack.enter_async_context(many(server, 3))
        for connection in idle:
            await connection.send(HEALTH)
            assert (await connection.answer()).status == 200
        for closed in (*idle, *halves):  # idle ones first, then those without a complete head
            late = await stack.enter_async_context(connected(server))
            await late.send(HEALTH[:-2])
            assert await closed.rest() == b""
            await until(lambda: len(server.connections) == 6)
        last = await stack.enter_async_context(connected(server))
        await last.send(HEALTH)
        assert (await last.answer()).status == 200
        core.hold.clear()
        assert (await running.answer()).status == 200


@on_uvloop
async def test_connections_of_every_kind_leave_room_for_others(tmp_path: Path) -> None:
    core = FakeCore(answer=says("y" * 100))
    core.hold.set()
    settings: dict[str, Any] = {
        "header_timeout": 1.0,
        "body_timeout": 1.0,
        "write_timeout": 1.0,
        "timeout_keep_alive": 1.0,
    }
    stream = {"prompt": "x", "stream": True, "n": 4, "max_tokens": 100, "logprobs": 20}
    async with running_server(tmp_path, core, capacity=100, **settings) as server, AsyncExitStack() as stack:
        for data in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: ", post(stream)[:-9]):
            await stack.enter_async_context(many(server, 30, data))
        for _ in range(10):
            stack.enter_context(silent(server, post(stream)))
        await until(lambda: server.state.models[0].client.slots_in_use == 40)
        assert (await server.http.get("/health")).status_code == 200
        core.hold.clear()
        answer = await server.post("/v1/completions", {"prompt": "x", "max_tokens": 5})
        assert answer.json()["choices"][0]["text"] == "yyyyy"
        await until(lambda: server.state.models[0].client.slots_in_use == 0)
        await until(lambda: server.state.in_flight == len(server.connections) == 0)


@on_uvloop
async def test_a_blocked_event_loop_is_not_held_against_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Connections(ConnectionOptions(header_timeout=4.0))
    loop = asyncio.get_running_loop()
    table._checked_at = loop.time() - 1000
    table._check_all(loop)
    assert 0 < table.clock < 4


class Silent:
    """A connection whose deadline has passed."""

    transport: asyncio.Transport

    def __init__(self, table: Connections, iterations: Iterations) -> None:
        self._table = table
        self._iterations = iterations

    def overdue(self) -> bool:
        self._iterations.note()
        return True

    def end_overdue(self) -> None:
        self._table.remove(self)


@on_uvloop
async def test_deadlines_of_many_connections_are_checked_in_slices() -> None:
    """All of them at once would block the event loop each second."""
    count = 2000
    with Iterations() as iterations:
        table = Connections(ConnectionOptions(header_timeout=0.01))
        for _ in range(count):
            assert table.add(Silent(table, iterations))
        await until(lambda: not len(table))
    assert iterations.total >= count
    assert iterations.most <= count // 4


@pytest.mark.parametrize(
    ("soft", "hard", "allowed", "raised"),
    [
        (1024, 1 << 20, 8192, 8192 + 320),
        (1 << 20, 1 << 20, 8192, None),
        (1024, 4096, 4096 - 320, 4096),
        (256, 256, 128, 256),
        (40, 40, 1, 40),
        (1024, resource.RLIM_INFINITY, 8192, 8192 + 320),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 8192, None),
    ],
)
def test_the_file_limit_is_raised_and_kept_to(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    allowed: int,
    raised: int | None,
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert Connections(ConnectionOptions()).limit == allowed
    assert limits[1:] == ([] if raised is None else [(raised, hard)])
    assert ("ulimit -n" in caplog.text) == (allowed < 8192)


UPGRADE = (
    "GET /v1/realtime?model=fake HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
)
KINDS = (
    b"",
    b"GET /hea",
    HEALTH.encode()[:-2] + b"Content-Length: 10\r\n\r\nx",
    HEALTH.encode() * 60,
    post({"prompt": "abc"})[:-3],
    post({"prompt": "abc"}),
    (UPGRADE + "\r\n").encode(),
    (UPGRADE + "Content-Length: 5\r\n\r\n").encode(),
    (UPGRADE + "\r\n").encode()[:-2],
    b"nonsense\r\n\r\n",
)


@on_uvloop
async def test_probes_are_answered_whatever_the_other_connections_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_RESERVE", 4)
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, limit_concurrency=3) as server, AsyncExitStack() as stack:
        for data in (*KINDS, *reversed(KINDS)):
            for _ in range(8):
                client = await stack.enter_async_context(connected(server))
                await client.send(data)
            for path in ("/health", "/ready", "/ping"):
                async with connected(server) as probe:
                    await probe.send(HEALTH.replace("/health", path))
                    assert (await probe.answer()).status == 200, data
            assert len(server.connections) <= 7
            assert len(server.connections.running) <= 3
        core.hold.clear()


@on_uvloop
async def test_requests_that_were_sent_ahead_get_places_when_their_turn_has_come(tmp_path: Path) -> None:
    async with running_server(tmp_path, limit_concurrency=1) as server, connected(server) as client:
        await client.send(post({"prompt": "abc"}) * 20)
        assert [(await client.answer()).status for _ in range(20)] == [200] * 20
        assert not server.connections.running
