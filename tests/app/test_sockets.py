"""The sockets on which the server listens."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from quire.app import listener as module
from quire.app.listener import Listener
from tests.support.iterations import Iterations
from tests.support.patience import PATIENCE
from tests.support.raw import on_uvloop
from tests.support.server import until


class Hello(asyncio.Protocol):
    """Greet, and close the connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        transport.write(b"hello")
        transport.close()


class Full(socket.socket):
    """Listen while this process has as many files as it may, twice."""

    failures = 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def listening(made: socket.socket) -> socket.socket:
    made.bind(("127.0.0.1", 0))
    made.listen(1000)
    return made


async def greeting(address: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    try:
        return await reader.read()
    finally:
        writer.close()


def starts_as_probe(data: bytes) -> bool:
    return data.startswith(b"probe")


def listener_of(made: socket.socket, protocol: type[Hello] = Hello, room: int = 8192) -> Listener:
    return Listener([made], protocol, lambda: room, starts_as_probe)


class Crowd:
    """Clients that have sent something before the server accepts them, and the order in which it opens them."""

    def __init__(self, *sent: bytes) -> None:
        self.opened: list[bytes] = []
        self.socket = listening(socket.socket())
        self.clients = {}
        for data in sent:
            client = socket.create_connection(self.socket.getsockname())
            client.sendall(data)
            self.clients[client.getsockname()] = (client, data)
        crowd = self

        class Noted(Hello):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                crowd.opened.append(crowd.clients[transport.get_extra_info("peername")][1])
                super().connection_made(transport)

        self.protocol = Noted

    async def be_opened(self, room: int = 8192) -> list[bytes]:
        listener = listener_of(self.socket, self.protocol, room)
        await until(lambda: len(self.opened) == len(self.clients))
        listener.close()
        for client, _ in self.clients.values():
            client.close()
        return self.opened


@pytest.mark.parametrize(("budget", "least", "most"), [(0.0, 1, 4), (1e9, 300, 300)])
@on_uvloop
async def test_connections_are_opened_in_slices(
    monkeypatch: pytest.MonkeyPatch, budget: float, least: int, most: int
) -> None:
    class Counted(Hello):
        def __init__(self) -> None:
            iterations.note()

        def connection_lost(self, exc: Exception | None) -> None:
            clients.pop().close()

    monkeypatch.setattr(module, "_ACCEPTING", budget)
    monkeypatch.setattr(module, "_OPENING", budget)
    with Iterations() as iterations:
        made = listening(socket.socket())
        clients = [socket.create_connection(made.getsockname()) for _ in range(300)]
        listener = listener_of(made, Counted)
        await until(lambda: not clients)
        listener.close()
    assert iterations.total == 300
    assert least <= iterations.most <= most


@on_uvloop
async def test_a_probe_overtakes_clients_that_connected_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ACCEPTING", 1e9)
    monkeypatch.setattr(module, "_OPENING", 0.0)
    order = await Crowd(*[b""] * 50, *[b"other"] * 50, b"probe").be_opened()
    assert order.index(b"probe") == 0


@on_uvloop
async def test_many_probes_do_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ACCEPTING", 1e9)
    monkeypatch.setattr(module, "_OPENING", 0.0)
    order = await Crowd(*[b"probe"] * 100, *[b"other"] * 10).be_opened()
    assert order[50:].count(b"other") == 0


@on_uvloop
async def test_no_more_connections_wait_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ACCEPTING", 1e9)
    monkeypatch.setattr(module, "_OPENING", 0.0)
    monkeypatch.setattr(module, "_LEAST_ROOM", 5)
    for room, first in ((0, 5), (20, 20), (1000, 31)):  # a probe behind 30 others is seen if it has been accepted
        order = await Crowd(*[b"other"] * 30, b"probe", *[b"other"] * 30).be_opened(room)
        assert (order.index(b"probe") == 0) == (first > 30), room


@on_uvloop
async def test_connections_that_wait_are_closed_with_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ACCEPTING", 1e9)
    monkeypatch.setattr(module, "_OPENING", 0.0)
    crowd = Crowd(*[b"other"] * 20)

    class Last(Hello):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
            listener.close()
            crowd.opened.append(b"other")
            super().connection_made(transport)

    listener = listener_of(crowd.socket, Last)
    for client, _ in crowd.clients.values():
        client.settimeout(PATIENCE)
        assert await asyncio.to_thread(received, client) in (b"hello", b"")
        client.close()
    assert len(crowd.opened) < 20


def received(client: socket.socket) -> bytes:
    try:
        return client.recv(100)
    except ConnectionResetError:  # it had sent something that was not read
        return b""


@pytest.mark.parametrize("error", [ConnectionResetError, RuntimeError])
@on_uvloop
async def test_a_connection_that_cannot_be_opened_does_not_keep_the_next_waiting(error: type[Exception]) -> None:
    class Failing(Hello):
        failures = 3

        def __init__(self) -> None:
            if Failing.failures:
                Failing.failures -= 1
                raise error

    made = listening(socket.socket())
    listener = listener_of(made, Failing)
    async with asyncio.timeout(PATIENCE):
        for expected in (b"", b"", b"", b"hello"):
            assert await greeting(made.getsockname()) == expected
    listener.close()


@on_uvloop
async def test_a_full_process_accepts_connections_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    made = listening(Full())
    listener = listener_of(made)
    assert await greeting(made.getsockname()) == b"hello"
    listener.close()
    assert caplog.text.count("Too many open files") == 2


@on_uvloop
async def test_a_closed_listener_refuses_connections() -> None:
    made = listening(socket.socket())
    address = made.getsockname()
    listener = listener_of(made)
    assert await greeting(address) == b"hello"
    listener.close()
    await listener.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await greeting(address)
    listener.close()
