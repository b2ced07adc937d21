"""API keys, body limits, CORS and request ids."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.server import running_server

COMPLETIONS = "/v1/completions"


async def test_keys_are_needed_everywhere_but_for_probes(tmp_path: Path) -> None:
    async with running_server(tmp_path, api_key=("one", "two")) as server:
        for path in ("/health", "/ready", "/ping"):
            assert (await server.http.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/load", "/docs", "/openapi.json", "/nowhere"):
            answer = await server.http.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == 401
        for path in ("/", "/page/page.js", COMPLETIONS):  # the page needs no key, the endpoint of the same path does
            assert (await server.post(path, {"prompt": "x"})).status_code == 401, path
        assert (await server.http.get("/")).status_code == 200
        for key in ("", "Bearer", "Bearer three", "one", "Basic one", "Bearer one two"):
            assert (await server.http.get("/v1/models", headers={"authorization": key})).status_code == 401
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await server.http.get("/v1/models", headers=headers)).status_code == 200
            assert (await server.post(COMPLETIONS, {"prompt": "x"}, headers=headers)).status_code == 200
            headers = {"authorization": f"bearer {key}"}
            assert (await server.http.get("/v1/models", headers=headers)).status_code == 200
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="three") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.retrieve("fake")


async def test_large_bodies_are_refused(tmp_path: Path) -> None:
    async with running_server(tmp_path, max_body_size=2000) as server:
        assert (await server.post(COMPLETIONS, {"prompt": "x" * 100})).status_code == 200
        answer = await server.post(COMPLETIONS, {"prompt": "x" * 3000})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == 413

        async def endless() -> object:
            for _ in range(100):
                yield b"x" * 100

        headers = {"content-type": "application/json"}
        try:
            answer = await server.http.post(COMPLETIONS, content=endless(), headers=headers)  # type: ignore[arg-type]
            assert answer.status_code == 413
        except httpx.WriteError:
            pass  # the server may hang up on a body that nobody wants
        assert (await server.post(COMPLETIONS, {"prompt": "x"})).status_code == 200


async def test_browsers_of_allowed_origins_may_call(tmp_path: Path) -> None:
    async with running_server(tmp_path, allowed_origins=("http://a.example",), api_key=("k",)) as server:
        headers = {"origin": "http://a.example", "access-control-request-method": "POST"}
        answer = await server.http.options(COMPLETIONS, headers=headers)
        assert answer.headers["access-control-allow-origin"] == "http://a.example"
        answer = await server.http.options(COMPLETIONS, headers={**headers, "origin": "http://b.example"})
        assert "access-control-allow-origin" not in answer.headers
        answer = await server.http.get("/v1/models", headers={"origin": "http://a.example"})
        exposed = "x-request-id, x-quire-ignored-fields, x-quire-not-stored, retry-after, server-timing"
        facts = ("limit", "remaining", "reset")
        limits = [f"x-ratelimit-{fact}-{unit}" for unit in ("requests", "tokens") for fact in facts]
        assert answer.status_code == 401
        assert answer.headers["access-control-expose-headers"] == ", ".join([exposed, *limits])


async def test_request_ids_are_given_or_taken(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(COMPLETIONS, {"prompt": "x"}, headers={"x-request-id": "mine-1 \u00e9"[:6]})
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.json()["id"] == "cmpl-mine-1"
        assert (await server.post(COMPLETIONS, {"prompt": "x", "request_id": "body"})).json()["id"] == "cmpl-body"
        answer = await server.post(COMPLETIONS, {"prompt": "x"}, headers={"x-request-id": "a b\tc"})
        assert answer.headers["x-request-id"] == "a_b_c"


async def test_a_large_body_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async with running_server(tmp_path, max_body_size=1000) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n".encode())
        async with asyncio.timeout(60):
            assert b" 413 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize("key", ["schl\u00fcssel", "\u0142\u00f3\u017c\u00e0", "k\u00e0", "\U0001f511"])
async def test_keys_may_have_any_characters(tmp_path: Path, key: str) -> None:
    async with running_server(tmp_path, api_key=(key, "other")) as server:
        encodings = [key.encode(), *([key.encode("latin-1")] if max(key) < "\u0100" else [])]
        for encoded in encodings:
            for name, value in ((b"authorization", b"Bearer " + encoded), (b"x-api-key", encoded)):
                assert (await server.http.get("/v1/models", headers=[(name, value)])).status_code == 200
                for wrong in (value[:-1], value + b"\xa0", value + b"\xff"):
                    assert (await server.http.get("/v1/models", headers=[(name, wrong)])).status_code == 401
