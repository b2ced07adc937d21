"""Bounds of one connection: sizes, times, requests that are sent ahead, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire.app.http_protocol import probe_detector
from tests.support.fake_core import FakeCore, says
from tests.support.raw import Raw, body_of, connected, on_uvloop, post, silent
from tests.support.server import Server, chunks_of, running_server, until

HEAD = "GET /health HTTP/1.1\r\nHost: localhost\r\n"
STREAM = {"prompt": "x", "max_tokens": 200, "stream": True, "logprobs": 20}  # more than fits into buffers
POST = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + "Transfer-Encoding: chunked\r\n\r\n"


async def flood(client: Raw, data: str, times: int) -> int:
    """Send the same data again and again until the server has answered. How often it was sent."""
    for count in range(times):
        await client.send(data)
        await asyncio.sleep(0)
        if client.reader._buffer:  # type: ignore[attr-defined]
            return count
    return times


def slots(server: Server) -> int:
    return server.state.models[0].client.slots_in_use


ENDLESS = (
    (HEAD, "a: b\r\n" * 100, 431, "--max-header-count"),
    (HEAD, f"a: {'b' * 1000}\r\n", 431, "--max-header-size"),
    (HEAD + "a: ", "b" * 1000, 431, "--max-header-size"),
    (HEAD, "b" * 1000, 431, "--max-header-size"),
    ("GET /", "x" * 1000, 414, "--max-url-size"),
    (CHUNKED + "1\r\n{\r\n0\r\n", "a: b\r\n" * 100, 431, "--max-header-count"),
    (CHUNKED + "0\r\na: ", "b" * 1000, 431, "--max-header-size"),
    (CHUNKED + "1;", "x" * 1000, 431, "--max-header-size"),
    ("", "\r\n" * 500, 431, "--max-header-size"),
)


@on_uvloop
async def test_a_head_without_end_is_refused_while_it_arrives(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for start, more, status, flag in ENDLESS:
            async with connected(server) as client:
                await client.send(start)
                assert await flood(client, more, 10_000) < 1000, (start, more)
                answer = await client.answer()
                assert (answer.status, answer.headers["connection"]) == (status, "close")
                assert flag in answer.message
                await client.rest()


def test_probes_are_recognized_by_their_first_bytes() -> None:
    for root in ("", "/api", "/a.b"):
        begins_probe = probe_detector(root)
        for prefix in {"", root}:
            for line in (
                "GET {}/health HTTP/1.1",
                "HEAD {}/ready HTTP/1.0",
                "POST {}/ping HTTP/1.1",
                "GET {}/health?a HTTP",
            ):
                assert begins_probe(line.format(prefix).encode()), line
        for line in (
            "",
            "GET /",
            "GET /healthy HTTP/1.1",
            "GET /v1/health HTTP/1.1",
            "xGET /health HTTP/1.1",
            "GET /axb/ping ",
        ):
            assert not begins_probe(line.encode()), line


@on_uvloop
async def test_what_is_within_the_bounds_is_served(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_header_count": 10, "max_header_size": 1000, "max_url_size": 500}
    async with running_server(tmp_path, **settings) as server, connected(server) as client:
        for _ in range(3):
            await client.send(HEAD + "a: b\r\n" * 8 + f"c: {'d' * 900}\r\n\r\n")
            assert (await client.answer()).status == 200
            await client.send(f"GET /health?{'x' * 480} HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await client.answer()).status == 200
        await client.send(HEAD + "a: b\r\n" * 10 + "\r\n")
        assert (await client.answer()).status == 431


UNFINISHED = (("", None), ("\r\n", None), ("GET", 408), (HEAD, 408), (HEAD + "\r\nGET", 408), (HEAD + "\r\n", None))


@on_uvloop
async def test_a_request_that_is_not_sent_is_not_waited_for(tmp_path: Path) -> None:
    async with running_server(tmp_path, header_timeout=0.1, timeout_keep_alive=0.1) as server:
        for sent, status in UNFINISHED:
            async with connected(server) as client:
                await client.send(sent)
                if HEAD in sent and sent != HEAD:
                    assert (await client.answer()).status == 200
                if status is not None:
                    answer = await client.answer()
                    assert (answer.status, "--header-timeout" in answer.message) == (status, True)
                assert await client.rest() == b"", sent
        await until(lambda: len(server.connections) == 0)


async def send_until_closed(client: Raw, data: str) -> None:
    """Send the same data every few milliseconds until the server has closed the connection."""
    with suppress(ConnectionError):
        async with asyncio.timeout(60):
            while True:
                await client.send(data)
                await asyncio.sleep(0.01)


@on_uvloop
async def test_blank_lines_do_not_keep_a_connection(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"header_timeout": 0.1, "timeout_keep_alive": 0.1}
    async with running_server(tmp_path, **settings) as server, connected(server) as client:
        await client.send(HEAD + "\r\n")
        assert (await client.answer()).status == 200
        await send_until_closed(client, "\r\n")


async def trickle(client: Raw, data: str) -> None:
    """Send the same data every few milliseconds until the server has answered."""
    async with asyncio.timeout(60):
        while not client.reader._buffer:  # type: ignore[attr-defined]
            await client.send(data)
            await asyncio.sleep(0.005)


SLOW_BODIES = (
    (post({"prompt": "x" * 10_000})[:200].decode(), "x"),
    (CHUNKED, "1\r\nx\r\n"),
    (CHUNKED + "1;", "x"),
    (CHUNKED + "1\r\n{\r\n0\r\n", "a: b\r\n"),
)


@on_uvloop
async def test_a_body_must_make_progress(tmp_path: Path) -> None:
    async with running_server(tmp_path, body_timeout=0.2) as server:
        for head, piece in SLOW_BODIES:
            async with connected(server) as client:
                await client.send(head)
                await trickle(client, piece)
                answer = await client.answer()
                assert (answer.status, "--body-timeout" in answer.message) == (408, True), head
                await client.rest()
            assert server.state.in_flight == 0


@on_uvloop
async def test_a_long_body_may_take_longer_than_the_timeout(tmp_path: Path) -> None:
    body = post({"prompt": "x", "user": "y" * 100_000})
    async with running_server(tmp_path, body_timeout=0.4) as server, connected(server) as client:
        for start in range(0, len(body), 1000):
            await client.send(body[start : start + 1000])
            await asyncio.sleep(0.01)
        assert (await client.answer()).status == 200


@on_uvloop
async def test_the_rest_of_a_body_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_body_size": 1000, "timeout_keep_alive": 0.1}
    async with running_server(tmp_path, **settings) as server, connected(server) as client:
        await client.send(post({"prompt": "x" * 2000})[:500])
        assert (await client.answer()).status == 413
        await send_until_closed(client, "x")


@on_uvloop
async def test_requests_that_are_sent_ahead_are_answered_in_order(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server, connected(server) as client:
        await client.send(b"".join(post({"prompt": f"number {number}"}) for number in range(20)))
        for number in range(20):
            answer = await client.answer()
            assert json.loads(answer.body)["choices"][0]["text"] == f"NUMBER {number}"
        await client.send((HEAD + "\r\n") * 5000)
        assert (await client.rest()).count(b"200 OK") < 100
        await until(lambda: len(server.connections) == 0)


@on_uvloop
async def test_a_client_that_leaves_after_sending_ahead_frees_what_runs(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        async with connected(server) as client:
            await client.send(post({"prompt": "x"}) + (HEAD + "\r\n").encode())
            await until(lambda: core.active)
        await until(lambda: not core.active)
        await until(lambda: server.state.in_flight == slots(server) == 0)


@on_uvloop
async def test_a_wish_for_another_protocol_changes_nothing(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server, connected(server) as client:
        for protocol in ("h2c", "h2c", "websocket", "nonsense"):
            headers = (f"Upgrade: {protocol}", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABk")
            request = post({"prompt": "abc"}, *headers)
            await client.send(request[:-5])
            await asyncio.sleep(0)
            await client.send(request[-5:])
            answer = await client.answer()
            assert answer.status == 200
            assert json.loads(answer.body)["choices"][0]["text"] == "ABC"


LENGTH = "Content-Length: 2\r\n"


REFUSED = (
    POST + LENGTH + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + "Transfer-Encoding: chunked\r\n" + LENGTH + "\r\n0\r\n\r\n",
    POST + LENGTH + "Content-Length: 3\r\n\r\n{}",
    POST + "Content-Length: +2\r\n\r\n{}",
    POST + "Content-Length: 2, 2\r\n\r\n{}",
    POST + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    CHUNKED + "-1\r\n",
    CHUNKED + "fffffffffffffffff\r\n",
    "GET /health HTTP/1.1\r\nHost: localhost\r\nHost: other\r\n\r\n",
    "GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
    "GET /health HTTP/1.1\r\nHost: a\r\n b: c\r\n\r\n",
    "GET /health HTTP/1.1\r\nHost: a\r\nb: \x00\r\n\r\n",
    "GET /\xe9 HTTP/1.1\r\nHost: a\r\n\r\n",
    "GET /health?a=\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n",
    "GET http://localhost HTTP/1.1\r\nHost: a\r\n\r\n",
    "CONNECT localhost:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    "NONSENSE /health HTTP/1.1\r\nHost: a\r\n\r\n",
    "GET /health HTTP/9.9\r\nHost: a\r\n\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "\x16\x03\x01\x02\x00\x01\x00",
)


@on_uvloop
async def test_ambiguous_and_broken_requests_are_refused(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for request_text in REFUSED:
            async with connected(server) as client:
                await client.send(request_text)
                answer = await client.answer()
                assert (answer.status, answer.headers["connection"]) == (400, "close"), request_text
                assert answer.message
                assert await client.rest() == b""


@on_uvloop
async def test_garbage_behind_a_request_does_not_get_into_its_response(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core) as server, connected(server) as client:
        await client.send(post({"prompt": "x", "stream": True}))
        await until(lambda: core.active)
        await client.send("nonsense\r\n\r\n")
        assert b"400" not in (await client.rest()).partition(b"\r\n\r\n")[2]
        await until(lambda: server.state.in_flight == slots(server) == 0)


SERVED = (
    ("GET /health HTTP/1.0\r\n\r\n", True),
    ("GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", True),
    ("GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n", False),
    ("HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n", False),
    ("\r\n\r\nGET /health?a=%C3%A9 HTTP/1.1\r\nHost: localhost\r\n\r\n", False),
)


@on_uvloop
async def test_unusual_requests_are_served(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for request_text, closes in SERVED:
            async with connected(server) as client:
                await client.send(request_text)
                assert (await client.answer()).status == 200, request_text
                if closes:
                    assert await client.rest() == b""
                else:
                    await client.send(HEAD + "\r\n")
                    assert (await client.answer()).status == 200


@on_uvloop
async def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_the_connection(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("y" * 200))) as server:
        for body in (STREAM, {**STREAM, "stream": False}):
            async with connected(server) as client:
                await client.send(post(body).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
                head, _, content = (await client.rest()).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head.lower()
            assert b"\r\nconnection: close" in head.lower()
            if body["stream"]:
                assert content.startswith(b"data: {")
                assert content.endswith(b"}\n\ndata: [DONE]\n\n")
                texts = [chunk["choices"][0]["text"] for chunk in chunks_of(content.decode())]
                assert "".join(texts) == "y" * 200
            else:
                assert json.loads(content)["choices"][0]["text"] == "y" * 200


@on_uvloop
async def test_a_client_may_ask_before_it_sends_its_body(tmp_path: Path) -> None:
    async with running_server(tmp_path, max_body_size=1000, body_timeout=5) as server, connected(server) as client:
        head, _, body = post({"prompt": "abc"}, "Expect: 100-continue").partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        assert (await client.answer()).status == 100
        await client.send(body)
        assert (await client.answer()).status == 200
        await client.send(post({"prompt": "x" * 2000}, "Expect: 100-continue").partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        assert (await client.answer()).status == 413


async def received(server: Server, data: bytes) -> AsyncIterator[bytes]:
    """What a client gets that begins to read when it is asked for."""
    with silent(server, data) as client:
        yield b""
        while data := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
            yield data


@on_uvloop
async def test_places_of_streams_are_free_when_their_sequences_have_ended(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("y" * 200)), capacity=24) as server:
        for _ in range(2):
            reading = received(server, post({**STREAM, "n": 24}, "Connection: close"))
            await anext(reading)
            await until(lambda: server.state.in_flight == 1)
            await until(lambda: slots(server) == 0)
            assert server.state.in_flight == 1
            assert (await server.post("/v1/completions", {"prompt": "x", "n": 24})).status_code == 200
            assert_complete(b"".join([data async for data in reading]), 24)
            await until(lambda: server.state.in_flight == 0)


def assert_complete(data: bytes, sequences: int) -> None:
    """A response has 200 tokens for each sequence."""
    texts = dict.fromkeys(range(sequences), "")
    for chunk in chunks_of(body_of(data).decode()):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert set(texts.values()) == {"y" * 200}


@pytest.mark.parametrize("end", [{"stop": "yyyyy"}, {"timeout": 1.0}])
@on_uvloop
async def test_the_engine_does_not_go_on_for_a_stream_that_has_ended_unread(tmp_path: Path, end: Any) -> None:
    core = FakeCore(answer=says("n" * 100 + "y" * 100))
    core.hold.set()
    core.allow(150 if "stop" in end else 100)
    async with running_server(tmp_path, core, capacity=16) as server:
        with silent(server, post({**STREAM, "n": 16, **end})):
            await until(lambda: core.active)
            await until(lambda: not core.active)
            await until(lambda: slots(server) == 0)
            assert server.state.in_flight == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@on_uvloop
async def test_a_client_that_does_not_read_is_disconnected(tmp_path: Path, path: str, stream: bool) -> None:
    core = FakeCore(answer=says("y" * 200))
    body: dict[str, Any] = {**STREAM, "stream": stream, "n": 8}
    if "chat" in path:
        body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    async with running_server(tmp_path, core, write_timeout=0.3, timeout_keep_alive=0.1) as server:
        with silent(server, post(body, path=path)), silent(server, post(body, path=path)):
            await until(lambda: len(server.connections) == 2)
            await until(lambda: len(server.connections) == 0)
            await until(lambda: server.state.in_flight == slots(server) == 0)
            assert server.state.models[0].client.open_streams == 0


@on_uvloop
async def test_a_client_that_reads_slowly_gets_everything(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("y" * 200)), write_timeout=0.4) as server:
        data = b""
        async for piece in received(server, post({**STREAM, "n": 8}, "Connection: close")):
            data += piece
            await asyncio.sleep(0.01)
        assert_complete(data, 8)
