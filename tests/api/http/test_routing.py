"""Checks and resources of the route class."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request

from quire.api.http.error_handlers import install_error_handlers
from quire.api.http.routing import CheckedRoute, detach_resources, enter_for_request, release_resources
from quire.protocol import fields
from quire.protocol.common import RequestBody
from quire.serving.malloc_trim import MallocTrimmer
from tests.support.fake_core import FakeCore
from tests.support.server import running_server, until


class Body(RequestBody):
    mode: str = "plain"


HELD: list[str] = []


@contextmanager
def held(name: str) -> Iterator[None]:
    HELD.append(name)
    try:
        yield
    finally:
        HELD.remove(name)


async def post(strict: bool = False, **body: object) -> httpx.Response:
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/")
    async def endpoint(body: Body, request: Request) -> list[str]:
        enter_for_request(request, held("slot"))
        fields.ignore(request, ["unused"] if body.mode == "unused" else [])
        if body.mode == "raise":
            raise ZeroDivisionError
        if body.mode == "release":
            release_resources(request)
        if body.mode == "detach":
            with detach_resources(request):
                assert HELD == ["slot"]
        return list(HELD)

    app = FastAPI()
    app.state.strict_fields, app.state.max_json_values, app.state.malloc_trimmer = strict, 10_000, MallocTrimmer()
    install_error_handlers(app)
    app.include_router(routes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.post("/", json=body)


@pytest.mark.parametrize(
    ("mode", "status", "seen"),
    [("plain", 200, ["slot"]), ("release", 200, []), ("detach", 200, []), ("raise", 500, None)],
)
async def test_resources_are_released(mode: str, status: int, seen: list[str] | None) -> None:
    answer = await post(mode=mode)
    assert answer.status_code == status
    assert seen is None or answer.json() == seen
    assert HELD == []


async def test_fields_without_effect_are_named_in_a_header_or_refused() -> None:
    assert fields.HEADER not in (await post()).headers
    assert (await post(odd=1)).headers[fields.HEADER] == "odd"
    assert (await post(odd=1, mode="unused")).headers[fields.HEADER] == "odd, unused"
    for body in ({"odd": 1}, {"mode": "unused"}):
        refused = await post(strict=True, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "odd" if "odd" in body else "unused")
    assert (await post(best_of=2)).status_code == 400
    assert HELD == []


def test_an_endpoint_with_a_body_needs_the_request() -> None:
    routes = APIRouter(route_class=CheckedRoute)
    with pytest.raises(TypeError, match="request"):

        @routes.post("/")
        async def endpoint(body: Body) -> None:
            """Cannot be checked."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "unknown": "JUNK"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "unknown": "JUNK"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "unknown": "JUNK"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "unknown": "JUNK"}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "a": "JUNK"}]}], "max_tokens": 9},
        ),
        ("/v1/responses", {"input": "x", "unknown": "JUNK"}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"unknown": "JUNK"}}),
    ],
)
async def test_a_running_request_does_not_hold_its_body(
    tmp_path: Path, path: str, fields: dict[str, Any], stream: bool
) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        assert await send(server.url, path, {**fields, "stream": stream}) == 200  # what it loads is loaded now
        core.hold.set()
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        client = asyncio.create_task(send(server.url, path, {**fields, "stream": stream}))
        await until(lambda: core.active)
        # The thread that has counted the values of the body drops it when the machine lets it run.
        await until(lambda: tracemalloc.get_traced_memory()[0] < before + 1_000_000)
        tracemalloc.stop()
        assert not client.done()
        core.hold.clear()
        assert await client == 200


async def send(url: str, path: str, fields: dict[str, Any]) -> int:
    """Send a body in which JUNK is replaced by 3 MB, of which nothing is kept here; returns the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    before, after = json.dumps(fields).encode().split(b'"JUNK"')
    start, end = before + b'["', b'"]' + after
    pieces = [b"x" * 10_000] * 250 + [b'",0,"'] + [b'","' * 2000] * 25
    length = len(start) + sum(map(len, pieces)) + len(end)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(head.encode() + f"content-length: {length}\r\n\r\n".encode())
    for piece in (start, *pieces, end):
        writer.write(piece)
        await writer.drain()
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    await reader.read()
    writer.close()
    return status
