"""WebSocket connections: what a client can do to the event loop and to memory."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from tests.support.realtime import client_of, speech_server
from tests.support.server import Server, until

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


async def longest_pause(of: asyncio.Future[None]) -> float:
    """Seconds for which the event loop was blocked at most, until something is done."""
    longest, last = 0.0, time.perf_counter()
    while not of.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


async def test_small_frames_do_not_block_the_event_loop(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        reader, writer = await raw(server)
        frames = 60_000
        writer.write((b"\x81\x80" + _MASK) * frames)  # empty messages, each of which gets an error event

        async def read() -> None:
            errors, mark, tail = 0, b'"invalid_json"', b""
            while errors < frames:
                received = await reader.read(1 << 20)
                assert received, f"the connection ended after {errors} errors"
                tail += received
                errors += tail.count(mark)
                tail = tail[-len(mark) + 1 :]  # a mark may be in two pieces, but the end of a whole one is none

        async with asyncio.timeout(100):
            reading = asyncio.ensure_future(read())
            # The parsing of one read of 256 KiB would take a second; the machine may be busy with other things.
            assert await longest_pause(reading) < 0.4
            await reading
        writer.close()


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
        async with asyncio.timeout(20):
            await reader.read()
        writer.close()
        await until(lambda: server.sessions.running == 0)
        async with client_of(server) as client:
            await client.expect("session.created")


async def test_no_other_path_is_upgraded(tmp_path: Path) -> None:
    """A request for another protocol is answered as HTTP everywhere else."""
    async with speech_server(tmp_path) as server:
        headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
        assert (await server.http.get("/v1/models", headers=headers)).status_code == 200
        assert (await server.http.post("/v1/realtime", headers=headers)).status_code == 405
