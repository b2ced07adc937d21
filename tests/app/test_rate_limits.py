"""Limits of API keys: requests and tokens per minute, and concurrent requests, also of WebSockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.support.fake_core import FakeCore
from tests.support.keys import bearer, write_keys
from tests.support.realtime import speech_server
from tests.support.server import Server, running_server, until

COMPLETIONS = "/v1/completions"


async def complete(server: Server, name: str, **fields: Any) -> httpx.Response:
    return await server.post(COMPLETIONS, {"prompt": "abc", **fields}, headers=bearer(name))


async def test_each_key_has_its_requests_per_minute(tmp_path: Path) -> None:
    path = write_keys(
        tmp_path / "keys.toml",
        alice={"requests_per_minute": 2},
        bob={},
        carol={"requests_per_minute": 0},
        ops={"admin": True},
    )
    async with running_server(tmp_path, api_key_file=path, requests_per_minute=3) as server:
        for name, allowed in (("alice", 2), ("bob", 3)):
            for left in range(allowed - 1, -1, -1):
                answer = await complete(server, name)
                assert answer.status_code == 200
                assert answer.headers["x-ratelimit-limit-requests"] == str(allowed)
                assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
                assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
                assert "x-ratelimit-limit-tokens" not in answer.headers
            refused = await complete(server, name)
            assert refused.status_code == 429
            assert 60 // allowed - 5 < int(refused.headers["retry-after"]) <= 60 // allowed
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            assert refused.json()["error"]["type"] == "RateLimitError"
            assert f"{allowed} requests per minute" in refused.json()["error"]["message"]
        for name in ("carol", "ops"):  # no limit
            for _ in range(4):
                answer = await complete(server, name)
                assert answer.status_code == 200
                assert not [header for header in answer.headers if header.startswith("x-ratelimit")]
        for unlimited in ("/metrics", "/version", "/load", "/health"):
            assert (await server.http.get(unlimited, headers=bearer("alice"))).status_code == 200
        metrics = (await server.http.get("/metrics", headers=bearer("bob"))).text
        assert 'quire:rate_limited_requests_total{key="alice",reason="requests"} 1.0' in metrics


async def test_a_refusal_comes_before_the_body_is_looked_at(tmp_path: Path) -> None:
    async with running_server(tmp_path, api_key=("key-a",), requests_per_minute=1) as server:
        assert (await server.http.get("/v1/nothing", headers=bearer("a"))).status_code == 404, "it counts"
        answer = await server.http.post(COMPLETIONS, content=b"{" * 10, headers=bearer("a"))
        assert answer.status_code == 429
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key-a", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError):
                await client.models.list()


async def test_tokens_are_counted_when_a_sequence_ends(tmp_path: Path) -> None:
    """Prompt tokens that were not cached, and generated tokens."""
    path = write_keys(tmp_path / "keys.toml", alice={"tokens_per_minute": 20}, bob={})
    async with running_server(tmp_path, api_key_file=path) as server:
        answer = await complete(server, "alice", max_tokens=3)
        used = answer.json()["usage"]["total_tokens"]
        assert answer.headers["x-ratelimit-limit-tokens"] == "20"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) == 20 - used
        assert (await complete(server, "alice", max_tokens=3, n=3)).status_code == 200, "it uses more than is left"
        refused = await complete(server, "alice")
        assert refused.status_code == 429
        assert "20 tokens per minute" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert (await complete(server, "bob")).status_code == 200


async def test_concurrent_requests_are_limited(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, api_key=("key-a", "key-b"), max_concurrent_requests=2) as server:
        running = [asyncio.create_task(complete(server, "a", stream=stream)) for stream in (True, False)]
        await until(lambda: len(core.active) == 2)
        refused = await complete(server, "a")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "may have 2 at once" in refused.json()["error"]["message"]
        other = asyncio.create_task(complete(server, "b"))
        await until(lambda: len(core.active) == 3)
        core.hold.clear()
        assert [(await task).status_code for task in (*running, other)] == [200] * 3
        assert (await complete(server, "a")).status_code == 200


async def test_sessions_are_requests_also_those_of_client_secrets(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"api_key": ("key-a", "key-b"), "max_concurrent_requests": 1, "requests_per_minute": 4}
    async with speech_server(tmp_path, **settings) as server:
        url = server.url.replace("http", "ws") + "/v1/realtime?model=fake"
        answer = await server.post("/v1/realtime/client_secrets", {}, headers=bearer("a"))
        secret = {"authorization": f"Bearer {answer.json()['value']}"}
        async with connect(url, additional_headers=secret) as session:
            await session.recv()
            assert session.response is not None
            assert session.response.headers["x-ratelimit-remaining-requests"] == "2"
            for headers in (secret, bearer("a")):
                with pytest.raises(InvalidStatus) as refused:
                    await connect(url, additional_headers=headers)
                assert refused.value.response.status_code == 429
                assert refused.value.response.headers["retry-after"] == "1"
            async with connect(url, additional_headers=bearer("b")) as other:
                await other.recv()
        await until(lambda: server.sessions.running == 0)
        assert (await server.http.get("/v1/models", headers=bearer("a"))).status_code == 200


async def test_what_was_used_counts_after_a_reload(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.toml", alice={"requests_per_minute": 2})
    async with running_server(tmp_path, api_key_file=path) as server:
        assert (await complete(server, "alice")).status_code == 200
        write_keys(path, alice={"requests_per_minute": 3}, bob={})
        server.keys.read()
        assert (await complete(server, "alice")).headers["x-ratelimit-remaining-requests"] == "1"
