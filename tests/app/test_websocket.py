"""WebSocket connections: what a client can do to the event loop and to memory."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import websockets
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.frames import Frame

from quire.app.connections import Connections
from quire.app.websocket import BoundedWebSocket
from quire.config.options import ConnectionOptions
from tests.support.iterations import Iterations
from tests.support.patience import PATIENCE
from tests.support.raw import connected
from tests.support.realtime import client_of, speech_server
from tests.support.server import Server, listening, until

_MASK = b"\0\0\0\0"


async def raw(
    server: Server, path: str = "/v1/realtime?model=fake"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has been upgraded."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def test_small_frames_do_not_block_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames, handled = 60_000, BoundedWebSocket.handle_text
    async with speech_server(tmp_path) as server:
        reader, writer = await raw(server)
        with Iterations() as iterations:

            def noted(connection: BoundedWebSocket, frame: Frame) -> None:
                iterations.note()
                handled(connection, frame)

            monkeypatch.setattr(BoundedWebSocket, "handle_text", noted)
            writer.write((b"\x81\x80" + _MASK) * frames)  # empty messages, each of which gets an error event
            errors, mark, tail = 0, b'"invalid_json"', b""
            async with asyncio.timeout(PATIENCE):
                while errors < frames:
                    received = await reader.read(1 << 20)
                    assert received, f"the connection ended after {errors} errors"
                    tail += received
                    errors += tail.count(mark)
                    tail = tail[-len(mark) + 1 :]  # a mark may be in two pieces, but the end of a whole one is none
        writer.close()
    assert iterations.total == frames
    assert iterations.most < 1000  # of the 43,000 that one read of 256 KiB brings


async def test_a_large_event_arrives_in_one_piece(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server, client_of(server) as client:
        await client.expect("session.created")
        text = json.dumps({"type": "x" * (3 << 20)})
        for fragments in (text, [text[at : at + 100_000] for at in range(0, len(text), 100_000)]):
            await client.connection.send(fragments)
            error = (await client.expect("error"))["error"]
            assert error["code"] == "unknown_event"
            assert "xxx" in error["message"]


async def test_fragments_without_end_are_refused(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        reader, writer = await raw(server)
        writer.write(b"\x01\x80" + _MASK + (b"\x00\x80" + _MASK) * 70_000)
        async with asyncio.timeout(60):
            received = await reader.read()
        assert (1009).to_bytes(2, "big") + b"the message has too many fragments" in received
        writer.close()
        await until(lambda: server.sessions.running == 0)


async def test_a_connection_counts_until_it_ends(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        before = len(server.connections)
        async with client_of(server) as client:
            await client.expect("session.created")
            assert len(server.connections) == before + 1
            assert not server.connections.idle
        await until(lambda: len(server.connections) == before)


@pytest.mark.parametrize("junk", [b"\xff\xff" + os.urandom(100), b"GET / HTTP/1.1\r\n\r\n", b"\x81\x05hello"])
async def test_what_is_no_frame_ends_the_session_only(tmp_path: Path, junk: bytes) -> None:
    async with speech_server(tmp_path) as server:
        reader, writer = await raw(server)
        writer.write(junk)
        writer.write_eof()
        async with asyncio.timeout(60):
            await reader.read()
        writer.close()
        await until(lambda: server.sessions.running == 0)
        async with client_of(server) as client:
            await client.expect("session.created")


HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
VERSION = "Sec-WebSocket-Version: 13\r\n"
REALTIME = "/v1/realtime?model=fake"
REFUSED_HANDSHAKES = (
    (HANDSHAKE + VERSION + "Content-Length: 5\r\n\r\nhello", "has a body"),
    (HANDSHAKE + VERSION + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "has a body"),
    (HANDSHAKE + "Sec-WebSocket-Version: 7\r\n\r\n", "Sec-WebSocket-Version"),
    (HANDSHAKE + "\r\n", "Sec-WebSocket-Version"),
    (HANDSHAKE.replace("Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n", VERSION) + "\r\n", "Sec-WebSocket-Key"),
    (HANDSHAKE.replace("AAAAAAAAAAAAAAAAAAAAAA==", "x") + VERSION + "\r\n", "Sec-WebSocket-Key"),
    (HANDSHAKE.replace("HTTP/1.1", "HTTP/1.0") + VERSION + "\r\n", "HTTP/1"),
)
NOT_ASCII = HANDSHAKE.replace("{path}", REALTIME + "\xe9") + VERSION + "\r\n"
UNUSUAL_HANDSHAKES = (
    (HANDSHAKE + VERSION + f"a: {'b' * 9000}\r\n\r\n", REALTIME),
    (HANDSHAKE + VERSION + "a: b\r\n" * 130 + "\r\n", REALTIME),
    (HANDSHAKE + VERSION + "Content-Length: 0\r\n\r\n", REALTIME),
    (HANDSHAKE + VERSION + "\r\n", f"{REALTIME}&x={'y' * 9000}"),
    (HANDSHAKE + VERSION + "\r\n", "/v1/real%74ime?model=fake"),
)


@pytest.mark.parametrize("keys", [(), ("secret",)])
async def test_handshakes_that_cannot_be_accepted_are_answered_and_closed(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    async with speech_server(tmp_path, api_key=keys) as server:
        for text, reason in (*REFUSED_HANDSHAKES, (NOT_ASCII, "Invalid char in url")):
            async with connected(server) as client:
                await client.send(text.format(path=REALTIME))
                answer = await client.answer()
                assert (answer.status, answer.headers["connection"]) == (400, "close"), text
                assert reason in answer.message
                assert await client.rest() == b""
        await until(lambda: not server.connections.running)


async def test_handshakes_within_the_bounds_of_requests_are_accepted(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        for text, path in UNUSUAL_HANDSHAKES:
            async with connected(server) as client:
                await client.send(text.format(path=path))
                assert (await client.answer()).status == 101, text[:400]
                assert b"session.created" in await client.reader.read(1 << 16)


async def test_handshakes_that_are_refused_take_no_place_of_probes(tmp_path: Path) -> None:
    async with speech_server(tmp_path, limit_concurrency=16) as server, AsyncExitStack() as stack:
        for index in range(100):
            client = await stack.enter_async_context(connected(server))
            text, _ = REFUSED_HANDSHAKES[index % len(REFUSED_HANDSHAKES)]
            await client.send(text.format(path=REALTIME))
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.http.get("/v1/models")).status_code == 200


async def test_a_handshake_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """An app that neither accepts nor refuses a WebSocket."""

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    table = Connections(ConnectionOptions(header_timeout=0.1))
    async with listening(silent, connections=table) as url:
        with pytest.raises(websockets.InvalidStatus) as refused:
            await connect(f"{url.replace('http', 'ws')}/v1/realtime")
        assert refused.value.response.status_code == 408
        await until(lambda: len(table) == 0)


async def test_no_other_path_is_upgraded(tmp_path: Path) -> None:
    """A request for another protocol is answered as HTTP everywhere else."""
    async with speech_server(tmp_path) as server:
        headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
        assert (await server.http.get("/v1/models", headers=headers)).status_code == 200
        assert (await server.http.post("/v1/realtime", headers=headers)).status_code == 405
