"""The total size of the bodies that arrive: which of them are refused, and that nobody else notices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.app import arriving_bodies
from quire.app.arriving_bodies import ArrivingBodies, ArrivingBody
from quire.app.serve import run
from quire.config.command import ConfigError
from quire.config.commands import Serve
from quire.protocol.errors import ApiError
from tests.support.fake_core import FakeCore
from tests.support.raw import Raw, connected, on_uvloop, post
from tests.support.server import Server, running_server, until

BODY = post({"prompt": "x", "user": "y" * 90_000})
MULTIPART = (
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n"
    b'Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\nContent-Disposition: form-data; name="file"; '
    b'filename="a.wav"\r\n\r\n' + b"x" * 89_000
)
BOUNDS: dict[str, Any] = {"max_body_size": 100_000, "max_total_body_size": 250_000}


@asynccontextmanager
async def arriving(server: Server, data: bytes, count: int) -> AsyncIterator[list[Raw]]:
    """Clients that have sent a part of their bodies."""
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(count):
            client = await stack.enter_async_context(connected(server))
            await client.send(data)
            clients.append(client)
            size = server.connections.bodies.size
            await until(lambda size=size: server.connections.bodies.size > size or server.connections.bodies.size < 1)
        yield clients


@pytest.mark.parametrize("data", [BODY[:-100], MULTIPART], ids=["json", "multipart"])
@on_uvloop
async def test_slow_bodies_make_room_for_others(tmp_path: Path, data: bytes) -> None:
    async with running_server(tmp_path, **BOUNDS) as server:
        bodies = server.connections.bodies
        async with arriving(server, data, 2) as slow:
            assert len(bodies) == 2
            for _ in range(3):
                async with connected(server) as client:
                    await client.send(BODY)
                    assert (await client.answer()).status == 200
            refused = await slow[0].answer()  # the one that began first
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert "--max-total-body-size" in refused.message
            assert await slow[0].rest() == b""
            assert len(bodies) == 1
        await until(lambda: len(bodies) == bodies.size == server.state.in_flight == 0)
        assert (await server.http.get("/health")).status_code == 200


@on_uvloop
async def test_bodies_that_were_parsed_do_not_count(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, **BOUNDS) as server, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(server)) for _ in range(6)]
        for index, client in enumerate(clients):
            await client.send(BODY)
            await until(lambda index=index: len(core.active) == index + 1)
            assert server.connections.bodies.size == 0
        core.hold.clear()
        assert [(await client.answer()).status for client in clients] == [200] * 6


ENDS = (
    (post({"prompt": "x", "user": "y" * 200_000})[:300], 413),  # too large: nobody reads it
    (post({"prompt": 1.5, "user": "y" * 1000}), 400),
    (post({"prompt": "x"})[:-1] + b"!", 400),
    (post({"prompt": "x" * 1000}, path="/nowhere")[:-10], 404),
    (BODY[:-100], None),  # the client leaves
)


@on_uvloop
async def test_bodies_do_not_count_after_their_request(tmp_path: Path) -> None:
    async with running_server(tmp_path, **BOUNDS) as server:
        bodies = server.connections.bodies
        for data, status in ENDS:
            async with connected(server) as client:
                await client.send(data)
                if status is not None:
                    assert (await client.answer()).status == status
                else:
                    await until(lambda: bodies.size)
            await until(lambda: len(bodies) == bodies.size == 0)


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Bodies:
    """Bodies of tenants, on a clock that tests advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        self.clock = Clock()
        monkeypatch.setattr(arriving_bodies, "time", self.clock)
        self.table = ArrivingBodies(limit)
        self.refused: list[str] = []

    def begin(self, name: str, tenant: str) -> ArrivingBody:
        def refuse(error: ApiError) -> None:
            self.refused.append(name)

        return self.table.begin({"client": (tenant, 1)}, refuse)

    def receive(self, body: ArrivingBody, size: int) -> None:
        self.table.receive(body, size, new_piece=False)


def test_the_body_that_is_most_behind_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = Bodies(monkeypatch, 10 << 20)
    burst, slow = bodies.begin("burst", "a"), bodies.begin("slow", "a")
    bodies.receive(burst, 5 << 20)
    bodies.receive(slow, 1 << 20)
    bodies.clock.now = 3.0
    fast = bodies.begin("fast", "a")
    bodies.receive(fast, 5 << 20)
    assert bodies.refused == ["slow"]
    bodies.clock.now = 60.0  # the rest of the burst has not come
    bodies.receive(bodies.begin("next", "a"), 1 << 20)
    assert bodies.refused == ["slow", "burst"]


def test_a_tenant_with_many_bodies_does_not_displace_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = Bodies(monkeypatch, 10 << 20)
    modest = bodies.begin("modest", "b")
    bodies.receive(modest, 1 << 20)
    bodies.clock.now = 100.0  # it is the slowest by far
    for index in range(30):
        bodies.receive(bodies.begin(f"greedy {index}", "a"), 1 << 20)
        bodies.clock.now += 1
    assert bodies.refused == [f"greedy {index}" for index in range(21)]
    bodies.receive(modest, 3 << 20)
    assert "modest" not in bodies.refused


def test_complete_bodies_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = Bodies(monkeypatch, 10 << 20)
    complete = bodies.begin("complete", "a")
    bodies.receive(complete, 9 << 20)
    complete.arriving = False
    bodies.clock.now = 50.0
    late = bodies.begin("late", "b")
    with pytest.raises(ApiError):
        bodies.receive(late, 2 << 20)
    complete.release()
    assert bodies.table.size == 0


def test_tiny_pieces_count_as_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = Bodies(monkeypatch, 1 << 20)
    tiny = bodies.begin("tiny", "a")
    pieces = (1 << 20) // (1 + 64)
    for _ in range(pieces):
        bodies.table.receive(tiny, 1, new_piece=True)
    with pytest.raises(ApiError):
        bodies.table.receive(tiny, 1, new_piece=True)


def test_the_bound_must_hold_one_body() -> None:
    with pytest.raises(ConfigError, match="--max-total-body-size is 1048576 bytes"):
        run(Serve.parse(["model", "--max-total-body-size", "1MiB"]))
