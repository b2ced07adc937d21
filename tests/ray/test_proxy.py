"""The middleware of Ray's proxies, around apps that behave as Ray's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import orjson
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.ray.prefixes import prefix_hashes, unpacked
from quire.ray.proxy import PREFIX, ReplicaProxy

CHAT = {"model": "m", "messages": [{"role": "user", "content": "All that is gold does not glitter. " * 40}]}


class Recorded:
    """An app that answers a request, and remembers it."""

    def __init__(self) -> None:
        self.scope: Scope = {}
        self.body = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        while True:
            message = await receive()
            self.body += message.get("body", b"")
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"ok"})


def _client(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(ReplicaProxy(app)), base_url="http://test")


async def test_the_router_gets_the_hashes_of_a_prompt_and_the_replica_the_whole_body() -> None:
    app = Recorded()
    async with _client(app) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)

    assert response.text == "ok"
    assert orjson.loads(app.body) == CHAT
    assert unpacked(app.scope[PREFIX]) == prefix_hashes(app.body) != []


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(body), 100):
        yield body[begin : begin + 100]


@pytest.mark.parametrize(
    ("headers", "content"),
    [
        ({"content-type": "application/json"}, b'{"messages": "\xff"}'),
        ({"content-type": "multipart/form-data"}, orjson.dumps(CHAT)),
        ({"content-type": "application/json"}, b" " * (3 << 20)),
    ],
)
async def test_other_bodies_pass_without_hashes(headers: dict[str, str], content: bytes) -> None:
    app = Recorded()
    async with _client(app) as client:
        await client.post("/v1/x", content=content, headers=headers)

    assert PREFIX not in app.scope
    assert app.body == content


async def test_a_body_of_unknown_length_passes_without_hashes() -> None:
    app = Recorded()
    async with _client(app) as client:
        await client.post("/v1/x", content=_pieces(orjson.dumps(CHAT)), headers={"content-type": "application/json"})

    assert PREFIX not in app.scope
    assert orjson.loads(app.body) == CHAT


def _dying(*messages: Message) -> ASGIApp:
    """An app that sends some messages and returns, as Ray's proxy does when a replica dies."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


def _start(kind: str) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]}


@pytest.mark.parametrize(
    ("path", "ending"),
    [
        ("/v1/chat/completions", b'data: {"error":{"message":"The replica'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"'),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":"server_error"'),
    ],
)
async def test_a_stream_of_a_dead_replica_ends_with_an_error_event(path: str, ending: bytes) -> None:
    first = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
    async with _client(_dying(_start("text/event-stream; charset=utf-8"), first)) as client:
        response = await client.post(path, json=CHAT)

    assert response.content.startswith(b"data: 1\n\n" + ending)


async def test_a_request_that_a_dead_replica_has_not_begun_to_answer_gets_status_503() -> None:
    async with _client(_dying()) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)

    assert response.status_code == 503
    assert response.json()["error"]["type"] == "ServiceUnavailableError"
    assert response.headers["retry-after"]


async def test_an_incomplete_answer_that_is_no_stream_is_not_completed() -> None:
    sent: list[Message] = []
    first = {"type": "http.response.body", "body": b'{"a', "more_body": True}
    app = ReplicaProxy(_dying(_start("application/json"), first))
    scope = {"type": "http", "method": "GET", "path": "/v1/x", "headers": []}
    await app(scope, _never, _into(sent))

    assert sent[-1] == first


async def _never() -> Message:
    await asyncio.Future[None]()
    raise AssertionError


def _into(sent: list[Message]) -> Callable[[Message], Any]:
    async def send(message: Message) -> None:
        sent.append(message)

    return send


async def test_a_session_of_a_dead_replica_ends_with_an_error_event() -> None:
    sent: list[Message] = []
    app = ReplicaProxy(_dying({"type": "websocket.accept"}, {"type": "websocket.send", "text": "{}"}))
    await app({"type": "websocket", "path": "/v1/realtime", "headers": []}, _never, _into(sent))

    assert [message["type"] for message in sent[-2:]] == ["websocket.send", "websocket.close"]
    assert orjson.loads(sent[-2]["text"])["type"] == "error"
    assert sent[-1]["code"] == 1012


async def test_a_session_that_its_replica_has_closed_is_not_touched() -> None:
    sent: list[Message] = []
    app = ReplicaProxy(_dying({"type": "websocket.accept"}, {"type": "websocket.close", "code": 1000}))
    await app({"type": "websocket", "path": "/v1/realtime", "headers": []}, _never, _into(sent))

    assert sent[-1] == {"type": "websocket.close", "code": 1000}
