"""The sockets on which the server listens."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from quire.app import sockets as module
from quire.app.sockets import Listener
from tests.support.iterations import Iterations
from tests.support.raw import on_uvloop
from tests.support.server import until


class Hello(asyncio.Protocol):
    """Greets, and closes the connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        transport.write(b"hello")
        transport.close()


class Full(socket.socket):
    """Listens while this process has as many files as it may, twice."""

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


@on_uvloop
async def test_many_connections_are_accepted_in_an_iteration_but_not_all() -> None:
    class Counted(Hello):
        def __init__(self) -> None:
            iterations.note()

        def connection_lost(self, exc: Exception | None) -> None:
            clients.pop().close()

    with Iterations() as iterations:
        made = listening(socket.socket())
        clients = [socket.create_connection(made.getsockname()) for _ in range(300)]
        listener = Listener(made, Counted)
        await until(lambda: not clients)
        listener.close()
    assert iterations.total == 300
    assert 16 < iterations.most < 150


@on_uvloop
async def test_a_full_process_accepts_connections_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    made = listening(Full())
    listener = Listener(made, Hello)
    assert await greeting(made.getsockname()) == b"hello"
    listener.close()
    assert caplog.text.count("Too many open files") == 2


@on_uvloop
async def test_a_closed_listener_refuses_connections() -> None:
    made = listening(socket.socket())
    address = made.getsockname()
    listener = Listener(made, Hello)
    assert await greeting(address) == b"hello"
    listener.close()
    await listener.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await greeting(address)
    listener.close()
