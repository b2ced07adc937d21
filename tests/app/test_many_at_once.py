"""Thousands of clients that do the same at the same time: the event loop serves one of them per iteration."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from quire.api.http import sse
from quire.api.http.sse import EventStream
from quire.api.http.streamed_body import response_of
from quire.app import http_protocol
from quire.app.connections import Connections
from quire.config.options import ConnectionOptions
from tests.support.fake_core import FakeCore, says
from tests.support.iterations import Iterations
from tests.support.raw import connected, on_uvloop
from tests.support.server import listening, running_server, until

COUNT = 100
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def open_clients(stack: ExitStack, url: str, table: Connections, data: bytes) -> None:
    """Open connections, then send data on all of them while the event loop waits."""
    host, port = url.removeprefix("http://").split(":")
    before = len(table)
    made = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(COUNT)]
    await until(lambda: len(table) == before + COUNT)
    for client in made:
        client.sendall(data)


@on_uvloop
async def test_requests_that_arrive_together_begin_one_by_one() -> None:
    with Iterations() as iterations, ExitStack() as stack:

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            iterations.note()
            await receive()

        table = Connections(ConnectionOptions())
        async with listening(app, connections=table) as url:
            await open_clients(stack, url, table, GET)
            await until(lambda: iterations.total == COUNT)
            stack.close()
    assert iterations.most == 1


@on_uvloop
async def test_a_probe_is_answered_before_requests_of_clients_that_connected_earlier() -> None:
    begun = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal begun
        begun += scope["path"] == "/"
        await PlainTextResponse(str(begun))(scope, receive, send)

    def connect_all(address: tuple[str, int], go_on: threading.Event) -> None:
        """Clients send requests and a probe while the event loop does not run."""
        for data in (*[GET] * COUNT, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"):
            clients.append(stack.enter_context(socket.create_connection(address)))
            clients[-1].sendall(data)
        go_on.set()

    clients: list[socket.socket] = []
    go_on = threading.Event()
    with ExitStack() as stack:
        async with listening(app, connections=Connections(ConnectionOptions())) as url:
            host, port = url.removeprefix("http://").split(":")
            crowd = threading.Thread(target=connect_all, args=((host, int(port)), go_on))
            crowd.start()
            go_on.wait()
            answer = await asyncio.to_thread(clients[-1].makefile("rb").read)
            crowd.join()
    assert int(answer.rpartition(b"\r\n\r\n")[2]) < COUNT // 4


HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@on_uvloop
async def test_websockets_that_arrive_or_leave_together_are_served_one_by_one() -> None:
    with Iterations() as begun, Iterations() as ended, ExitStack() as stack:

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            begun.note()
            assert (await receive())["type"] == "websocket.connect"
            await send({"type": "websocket.accept"})
            assert (await receive())["type"] == "websocket.disconnect"
            ended.note()

        table = Connections(ConnectionOptions())
        async with listening(app, connections=table) as url:
            await open_clients(stack, url, table, HANDSHAKE)
            await until(lambda: begun.total == COUNT)
            stack.close()
            await until(lambda: ended.total == COUNT)
    assert (begun.most, ended.most) == (1, 1)


@on_uvloop
async def test_clients_that_leave_together_are_noticed_one_by_one() -> None:
    with Iterations() as iterations, ExitStack() as stack:
        waiting = 0

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal waiting
            await receive()
            waiting += 1
            assert (await receive())["type"] == "http.disconnect"
            iterations.note()

        table = Connections(ConnectionOptions())
        async with listening(app, connections=table) as url:
            await open_clients(stack, url, table, GET)
            await until(lambda: waiting == COUNT)
            stack.close()
            await until(lambda: iterations.total == COUNT)
    assert iterations.most == 1


@on_uvloop
async def test_connections_that_are_late_together_are_closed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with Iterations() as iterations, ExitStack() as stack:
        refuse = http_protocol.BoundedProtocol._refuse

        def noted(*arguments: object) -> None:
            iterations.note()
            refuse(*arguments)  # type: ignore[arg-type]

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            raise AssertionError

        monkeypatch.setattr(http_protocol.BoundedProtocol, "_refuse", noted)
        table = Connections(ConnectionOptions(header_timeout=0.5))
        async with listening(app, connections=table) as url:
            await open_clients(stack, url, table, GET[:-2])
            await until(lambda: iterations.total == COUNT)
            await until(lambda: len(table) == 0)
    assert iterations.most == 1


async def events() -> AsyncGenerator[bytes, None]:
    for _ in range(40):
        yield b"x" * 4096


@pytest.mark.parametrize("kind", ["events", "body"])
async def test_readers_of_long_answers_are_served_in_turn(kind: str) -> None:
    with Iterations() as iterations:

        async def never() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            iterations.note(len(message.get("body", b"")))

        def answer() -> EventStream:
            if kind == "events":
                return EventStream(events(), keepalive=0)
            return response_of(iter([b"x" * 4096] * 100))  # type: ignore[return-value]

        async with asyncio.TaskGroup() as group:
            for _ in range(COUNT):
                group.create_task(answer()({"type": "http"}, never, send))
    assert iterations.total > COUNT * 40 * 4096
    assert iterations.most < (3 << 14 if kind == "events" else 3 << 17)


@on_uvloop
async def test_readers_of_a_response_in_the_background_are_served_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = FakeCore(answer=says("y" * 50))
    core.hold.set()
    core.allow(1)
    encode = sse.typed_event
    async with running_server(tmp_path, core) as server:
        body = {"input": "x", "background": True, "stream": False}
        response_id = (await server.post("/v1/responses", body)).json()["id"]
        with Iterations() as iterations, ExitStack() as stack:

            def noted(event: object) -> bytes:
                iterations.note()
                return encode(event)  # type: ignore[arg-type]

            monkeypatch.setattr("quire.api.responses.routes.typed_event", noted)
            path = f"/v1/responses/{response_id}?stream=true"
            await open_clients(stack, server.url, server.connections, GET.replace(b"/ ", path.encode() + b" "))
            for events_of_each in (5, 6, 7, 8):  # the first token is preceded by four events of what begins
                await until(lambda: iterations.total == events_of_each * COUNT)  # noqa: B023
                core.allow(1)  # tokens of steps that are made together come in one event
            assert iterations.most < 20
            async with connected(server) as client:
                await client.send(GET.replace(b"/ ", b"/health "))
                assert (await client.answer()).status == 200
        core.hold.clear()
