"""Clients that speak HTTP by hand: they send and read exactly what a test says."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec

import httptools
import httpx
import uvloop

from tests.support.server import Server

Arguments = ParamSpec("Arguments")
_SECONDS = 60  # after which a test fails


def on_uvloop(test: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, None]:
    """Run a test on the event loop of `quire serve`."""

    @functools.wraps(test)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        uvloop.run(test(*args, **kwargs))

    return run


@dataclass
class Answer:
    """A response without Transfer-Encoding."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        return str(json.loads(self.body)["error"]["message"])


@dataclass
class Raw:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: str | bytes) -> None:
        """Send data.

        Raises:
            ConnectionError: the connection has been closed.
        """
        if self.writer.is_closing():  # uvloop would raise a RuntimeError
            raise ConnectionResetError
        self.writer.write(data.encode("latin-1") if isinstance(data, str) else data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        """The next response."""
        async with asyncio.timeout(_SECONDS):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(head[0].split()[1]), headers, body)

    async def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        received = b""
        async with asyncio.timeout(_SECONDS):
            try:
                while data := await self.reader.read(1 << 16):
                    received += data
            except ConnectionResetError:
                pass
        return received


def post(body: Any, *headers: str, path: str = "/v1/completions") -> bytes:
    """A complete request with a JSON body."""
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode("latin-1") + content


def body_of(data: bytes) -> bytes:
    """The body of a complete response."""
    parts: list[bytes] = []

    class Handler:
        on_body = staticmethod(parts.append)

    httptools.HttpResponseParser(Handler()).feed_data(data)
    return b"".join(parts)


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Raw]:
    """A connection to a server."""
    url = httpx.URL(server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


@contextmanager
def silent(server: Server, data: bytes = b"") -> Iterator[socket.socket]:
    """A connection whose client sends a little and reads nothing; its receive buffer is small."""
    url = httpx.URL(server.url)
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect((url.host, url.port))
        made.sendall(data)
        made.setblocking(False)
        yield made
