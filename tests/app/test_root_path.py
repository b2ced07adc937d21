"""--root-path: a server behind a reverse proxy, which may or may not strip the prefix, treats requests the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import connect

from quire.config.command import ConfigError
from quire.config.commands import Serve
from tests.support.fake_core import FakeCore
from tests.support.raw import connected, on_uvloop, post
from tests.support.realtime import speech_server
from tests.support.server import running_server, until

PREFIXES = ("", "/api")
ROOT: dict[str, Any] = {"root_path": "/api"}


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_probes_and_the_page_need_no_key_below_a_prefix(tmp_path: Path, prefix: str) -> None:
    async with running_server(tmp_path, api_key=("secret",), **ROOT) as server:
        for path in ("/health", "/ready", "/ping", "/", "/page/app.js"):
            assert (await server.http.get(prefix + path)).status_code == 200, path
        for path in ("/metrics", "/v1/models", "/healthy"):
            assert (await server.http.get(prefix + path)).status_code == 401, path
        headers = {"authorization": "Bearer secret"}
        assert (await server.http.get(f"{prefix}/v1/models", headers=headers)).status_code == 200
        other = await server.http.get("/other/health")
        assert other.status_code == 401, "another prefix is a path like any other"


@pytest.mark.parametrize("prefix", PREFIXES)
@on_uvloop
async def test_probes_are_answered_when_no_place_is_free_below_a_prefix(tmp_path: Path, prefix: str) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, limit_concurrency=1, **ROOT) as server, connected(server) as client:
        await client.send(post({"prompt": "x"}))
        await until(lambda: core.active)
        refused = await server.post(f"{prefix}/v1/messages", {"max_tokens": 1})
        assert (refused.status_code, refused.json()["type"]) == (503, "error")
        assert (await server.http.get(f"{prefix}/health")).status_code == 200
        core.hold.clear()


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_errors_have_the_shape_of_their_api_below_a_prefix(tmp_path: Path, prefix: str) -> None:
    async with running_server(tmp_path, max_body_size=2000, max_header_size=2000, **ROOT) as server:
        large = {"x-large": "x" * 3000}
        for body, headers in (({"max_tokens": 1}, {}), ({"messages": "x" * 3000}, {}), ({}, large)):
            answer = await server.post(f"{prefix}/v1/messages", body, headers=headers)
            assert answer.json()["type"] == "error", answer.text
            answer = await server.post(f"{prefix}/v1/responses", body, headers=headers)
            assert answer.json()["error"]["type"] == "invalid_request_error", answer.text


async def test_misdirected_probes_and_drains_below_a_prefix(tmp_path: Path) -> None:
    async with running_server(tmp_path, **ROOT) as server:
        headers = {"host": "evil.example"}
        assert (await server.http.get("/api/health", headers=headers)).status_code == 200
        assert (await server.http.get("/api/v1/models", headers=headers)).status_code == 421
        server.state.draining = True
        assert (await server.http.get("/api/v1/models")).status_code == 503
        assert (await server.http.get("/api/metrics")).status_code == 200
        assert (await server.http.get("/api/load")).json() == {"server_load": 0}


async def test_redirects_and_the_schema_keep_the_prefix(tmp_path: Path) -> None:
    async with running_server(tmp_path, **ROOT) as server:
        for path in ("/health/", "/api/health/"):
            assert (await server.http.get(path)).headers["location"] == f"{server.url}/api/health"
        assert (await server.http.get("/api")).headers["location"] == f"{server.url}/api/"
        assert (await server.http.get("/openapi.json")).json()["servers"] == [{"url": "/api"}]


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_sessions_open_below_a_prefix(tmp_path: Path, prefix: str) -> None:
    async with speech_server(tmp_path, **ROOT) as server:
        url = f"{server.url.replace('http', 'ws')}{prefix}/v1/realtime"
        async with connect(f"{url}?model=fake") as client:
            assert "session.created" in str(await client.recv())
        with pytest.raises(websockets.InvalidStatus) as refused:
            await connect(f"{url}?model=nowhere")
        assert refused.value.response.status_code == 404


def test_a_prefix_begins_with_a_slash() -> None:
    assert Serve(root_path="/api/").root_path == "/api"
    with pytest.raises(ConfigError, match="--root-path"):
        Serve.parse(["model", "--root-path", "api"])
