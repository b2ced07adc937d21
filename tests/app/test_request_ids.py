"""Every answer has the id of its request, also if nothing but the parser has seen it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import connect

from quire.app.connections import Connections
from quire.config.options import ConnectionOptions
from tests.support.fake_core import FakeCore
from tests.support.raw import connected, on_uvloop, post
from tests.support.realtime import speech_server
from tests.support.server import listening, running_server, until

MINE = {"x-request-id": "mine"}
GENERATED = re.compile("[0-9a-f]{32}")


async def test_answers_of_all_layers_have_the_id(tmp_path: Path) -> None:
    async with running_server(tmp_path, api_key=("key",), max_body_size=2000) as server:
        key = {"authorization": "Bearer key"}
        cases: list[tuple[str, str, Any, dict[str, str], int]] = [
            ("GET", "/health", None, {}, 200),
            ("GET", "/metrics", None, key, 200),
            ("GET", "/load", None, key, 200),
            ("GET", "/version", None, key, 200),
            ("GET", "/", None, {}, 200),
            ("GET", "/v1/models", None, {}, 401),
            ("GET", "/v1/models", None, {"host": "a, b"}, 401),
            ("GET", "/nowhere", None, key, 404),
            ("PUT", "/v1/completions", None, key, 405),
            ("POST", "/v1/completions", {"prompt": "x" * 3000}, key, 413),
            ("POST", "/v1/completions", {"prompt": 1.5}, key, 400),
            ("POST", "/v1/completions", {"prompt": "x", "stream": True}, key, 200),
        ]
        for method, path, body, headers, status in cases:
            answer = await server.http.request(method, path, json=body, headers={**headers, **MINE})
            assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["mine"]), path
            answer = await server.http.request(method, path, json=body, headers=headers)
            assert GENERATED.fullmatch(answer.headers["x-request-id"]), path


REFUSED = (
    ("GET / HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine\r\nHost: b\r\n\r\n", 400, "mine"),
    ("GET / HTTP/1.1\r\nX-Request-Id: mine\r\n" + "a: b\r\n" * 300, 431, "mine"),
    ("GET / HTTP/1.1\r\nX-Request-Id: a b\r\nx: \0\r\n", 400, "a_b"),
    ("GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400, None),
    ("nonsense\r\n\r\n", 400, None),
)


@on_uvloop
async def test_refusals_of_the_parser_have_the_id(tmp_path: Path) -> None:
    async with running_server(tmp_path, max_header_size=1000) as server:
        for text, status, request_id in REFUSED:
            async with connected(server) as client:
                await client.send(text)
                answer = await client.answer()
                assert answer.status == status, text
                assert answer.headers["x-request-id"] == request_id or (
                    request_id is None and GENERATED.fullmatch(answer.headers["x-request-id"])
                ), text
        async with connected(server) as client:  # the id is not that of the request before
            await client.send("GET /health HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine\r\n\r\n")
            assert (await client.answer()).headers["x-request-id"] == "mine"
            await client.send("nonsense\r\n\r\n")
            assert GENERATED.fullmatch((await client.answer()).headers["x-request-id"])


@on_uvloop
async def test_late_and_surplus_requests_have_the_id(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    settings: dict[str, Any] = {"limit_concurrency": 1, "body_timeout": 0.2, "header_timeout": 0.2}
    async with running_server(tmp_path, core, **settings) as server:
        for late in (
            post({"prompt": "x"}, "X-Request-Id: mine")[:-3],
            b"GET / HTTP/1.1\r\nX-Request-Id: mine\r\na: b\r\n",
        ):
            async with connected(server) as client:
                await client.send(late)
                answer = await client.answer()
                assert (answer.status, answer.headers["x-request-id"]) == (408, "mine")
        async with connected(server) as client:
            await client.send(post({"prompt": "x"}))
            await until(lambda: core.active)
            refused = await server.http.get("/v1/models", headers=MINE)
            assert (refused.status_code, refused.headers["x-request-id"]) == (503, "mine")
            core.hold.clear()


async def test_an_app_that_fails_answers_with_the_id() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError

    async with listening(failing, connections=Connections(ConnectionOptions())) as url, httpx.AsyncClient() as client:
        answer = await client.get(url, headers=MINE)
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")


@pytest.mark.parametrize("headers", [MINE, {}])
async def test_handshakes_have_the_id(tmp_path: Path, headers: dict[str, str]) -> None:
    def is_right(request_id: str) -> bool:
        return request_id == "mine" if headers else GENERATED.fullmatch(request_id) is not None

    async with speech_server(tmp_path, api_key=("key",)) as server:
        url = f"{server.url.replace('http', 'ws')}/v1/realtime"
        key = {"authorization": "Bearer key"}
        async with connect(f"{url}?model=fake", additional_headers={**headers, **key}) as client:
            assert client.response is not None
            assert is_right(client.response.headers["x-request-id"])
        for query, sent, status in (("model=fake", {}, 401), ("model=nowhere", key, 404)):
            with pytest.raises(websockets.InvalidStatus) as refused:
                await connect(f"{url}?{query}", additional_headers={**headers, **sent})
            response = refused.value.response
            assert response.status_code == status
            assert is_right(response.headers["x-request-id"])
