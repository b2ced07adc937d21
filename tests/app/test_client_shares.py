"""One client does not take what the server has for all: another key, or another address, finds room."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from quire.api.responses import worker
from quire.api.responses.database import Database
from quire.config.commands import Serve
from quire.workers.queue import TenantQueue
from quire.workers.shares import Shares
from tests.support import speech
from tests.support.audio import encode, tone, wav
from tests.support.fake_core import FakeCore
from tests.support.patience import PATIENCE
from tests.support.realtime import speech_server
from tests.support.server import Server, running_server, until

KEYS = ("a", "b")
SHARE = Serve.model_fields["max_client_share"].default


@asynccontextmanager
async def client_at(server: Server, address: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(local_address=address)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, transport=transport) as client:
        yield client


async def fill(server: Server, core: FakeCore, path: str, body: Any, headers: Any) -> list[asyncio.Task[Any]]:
    """Send more requests than a client may have; returns those that are answered when the core goes on."""
    tasks = [asyncio.create_task(server.post(path, body, headers=headers)) for _ in range(8)]
    await until(lambda: sum(task.done() for task in tasks) == 2 and len(core.active) == 6)
    refused = [task.result() for task in tasks if task.done()]
    assert [answer.status_code for answer in refused] == [429, 429]
    for answer in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert "--max-client-share" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == 429
    return [task for task in tasks if not task.done()]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_another_key_finds_a_place(tmp_path: Path, path: str, body: Any) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, capacity=8, api_key=KEYS, max_client_share=SHARE) as server:
        running = await fill(server, core, path, body, {"authorization": "Bearer a"})
        other = asyncio.create_task(server.post(path, body, headers={"authorization": "Bearer b"}))
        await until(lambda: len(core.active) == 7)
        core.hold.clear()
        assert [(await task).status_code for task in (*running, other)] == [200] * 7
        await until(lambda: server.state.models[0].client.slots_in_use == 0)
        assert (await server.post(path, body, headers={"authorization": "Bearer a"})).status_code == 200


async def test_a_key_finds_a_place_beside_responses_in_the_background(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    body = {"input": "x", "background": True}
    async with running_server(tmp_path, core, capacity=8, api_key=KEYS, max_client_share=SHARE) as server:
        statuses = [
            (await server.post("/v1/responses", body, headers={"authorization": f"Bearer {key}"})).status_code
            for key in ("a",) * 7 + ("b",)
        ]
        assert statuses == [200] * 6 + [429, 200]
        core.hold.clear()


async def test_another_address_finds_a_place_on_a_server_without_several_keys(tmp_path: Path) -> None:
    for keys in ((), ("a",)):
        core = FakeCore()
        core.hold.set()
        headers = {"authorization": "Bearer a"}
        async with (
            running_server(tmp_path, core, capacity=8, api_key=keys, max_client_share=SHARE) as server,
            client_at(server, "127.0.0.2") as elsewhere,
        ):
            running = await fill(server, core, "/v1/completions", {"prompt": "x"}, headers)
            other = asyncio.create_task(elsewhere.post("/v1/completions", json={"prompt": "x"}, headers=headers))
            await until(lambda core=core: len(core.active) == 7)
            core.hold.clear()
            assert [(await task).status_code for task in (*running, other)] == [200] * 7


async def test_a_key_is_one_client_at_all_addresses(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    headers = {"authorization": "Bearer a"}
    async with (
        running_server(tmp_path, core, capacity=8, api_key=KEYS, max_client_share=SHARE) as server,
        client_at(server, "127.0.0.2") as elsewhere,
    ):
        running = await fill(server, core, "/v1/completions", {"prompt": "x"}, headers)
        refused = await elsewhere.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert refused.status_code == 429
        core.hold.clear()
        await asyncio.gather(*running)


async def test_a_request_for_more_than_a_client_may_have_is_invalid(tmp_path: Path) -> None:
    async with running_server(tmp_path, capacity=8, api_key=KEYS, max_client_share=SHARE) as server:
        headers = {"authorization": "Bearer a"}
        assert (await server.post("/v1/completions", {"prompt": "x", "n": 6}, headers=headers)).status_code == 200
        answer = await server.post("/v1/completions", {"prompt": "x", "n": 7}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


async def test_clients_of_other_apis_know_the_error(tmp_path: Path) -> None:
    import anthropic  # not where each process collects tests: it takes a second

    core = FakeCore()
    core.hold.set()
    async with (
        running_server(tmp_path, core, capacity=8, api_key=KEYS, max_client_share=SHARE) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=server.url, api_key="a", max_retries=0) as claude,
    ):
        running = await fill(server, core, "/v1/completions", {"prompt": "x"}, {"authorization": "Bearer a"})
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="fake", prompt="x")
        with pytest.raises(anthropic.RateLimitError) as refused:
            await claude.messages.create(model="fake", max_tokens=9, messages=[{"role": "user", "content": "x"}])
        assert refused.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
        core.hold.clear()
        await asyncio.gather(*running)


async def test_one_key_does_not_take_all_realtime_sessions(tmp_path: Path) -> None:
    settings: Any = {"max_realtime_sessions": 4, "api_key": KEYS, "max_client_share": SHARE}
    async with speech_server(tmp_path, **settings) as server, AsyncExitStack() as sessions:

        async def open_session(key: str) -> None:
            url = server.url.replace("http", "ws") + "/v1/realtime?intent=transcription"
            headers = {"Authorization": f"Bearer {key}"}
            await sessions.enter_async_context(connect(url, additional_headers=headers))

        secret = await server.post("/v1/realtime/client_secrets", {}, headers={"authorization": "Bearer a"})
        for key in ("a", "a", secret.json()["value"]):  # a secret is that of its key
            await open_session(key)
        for key in ("a", secret.json()["value"]):
            with pytest.raises(InvalidStatus) as refused:
                await open_session(key)
            response = refused.value.response
            assert (response.status_code, int(response.headers["retry-after"])) == (429, 5)
            assert b"--max-client-share" in bytes(response.body or b"")
        await open_session("b")
        with pytest.raises(InvalidStatus) as full:
            await open_session("b")
        assert full.value.response.status_code == 503


async def test_one_client_does_not_fill_the_queue_of_prompts(tmp_path: Path) -> None:
    """Of endpoints that need no place in the engine."""
    async with running_server(tmp_path, api_key=KEYS, max_client_share=SHARE) as server:
        threads = server.state.models[0].renderer._threads
        threads._free, threads._queue = 0, TenantQueue(4, SHARE)  # as if long prompts were tokenized
        body = {"prompt": "x" * 100_000, "model": "fake"}

        def send(key: str) -> asyncio.Task[Any]:
            return asyncio.create_task(server.post("/tokenize", body, headers={"authorization": f"Bearer {key}"}))

        waiting = [send("a") for _ in range(3)]
        await until(lambda: len(threads._queue) == 3)
        answer = await send("a")
        assert (answer.status_code, "retry-after" in answer.headers) == (429, True)
        assert "--max-client-share" in answer.json()["error"]["message"]
        waiting.append(send("b"))
        await until(lambda: len(threads._queue) == 4)
        threads._release()  # one thread has finished
        assert [(await task).status_code for task in waiting] == [200] * 4


async def test_one_client_does_not_take_the_memory_of_audio(tmp_path: Path) -> None:
    """Its further files wait for those before them, at last in vain, and hold up no other client."""
    minutes = encode(np.zeros((600 * 1000, 1), np.float32), "flac", rate=1000)  # takes 100 MB while it is transcribed
    core = speech.SpeechCore()
    core.hold.set()
    settings: Any = {"api_key": KEYS, "max_client_share": SHARE, "max_media_memory": "200MiB"}
    async with speech.speech_server(tmp_path, core, **settings) as server:
        memory = server.state.media_memory

        def send(key: str, content: bytes) -> asyncio.Task[Any]:
            upload, headers = {"file": ("a", content)}, {"authorization": f"Bearer {key}"}
            return asyncio.create_task(server.http.post("/v1/audio/transcriptions", files=upload, headers=headers))

        first = send("a", minutes)
        await until(lambda: len(core.active) == 1)
        second = send("a", minutes)
        await until(lambda: memory.waiting == 1)
        other = send("b", wav(tone(1.0)))
        await until(lambda: len(core.active) == 2)
        memory._patience = 0.3
        refused = await send("a", minutes)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
        assert "--max-client-share" in refused.json()["error"]["message"]
        assert memory.waiting == 1
        core.hold.clear()
        assert [(await task).status_code for task in (first, second, other)] == [200] * 3
        invalid = await send("a", encode(np.zeros((1800 * 1000, 1), np.float32), "flac", rate=1000))
        assert (invalid.status_code, invalid.json()["error"]["param"]) == (400, "file")
        assert "--max-client-share" in invalid.json()["error"]["message"]


async def test_one_client_does_not_keep_others_from_storing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_MAX_WAITING", 4)
    read, go = Database.get, threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        assert go.wait(PATIENCE)
        return read(*arguments, **options)

    async with running_server(tmp_path, api_key=KEYS, max_client_share=SHARE) as server:

        def send(key: str) -> asyncio.Task[Any]:
            headers = {"authorization": f"Bearer {key}"}
            return asyncio.create_task(server.http.get("/v1/responses/resp_x", headers=headers))

        assert (await send("a")).status_code == 404
        monkeypatch.setattr(Database, "get", slow)
        waiting = [send("a") for _ in range(4)]
        await until(lambda: any(task.done() for task in waiting))
        (refused,) = [task.result() for task in waiting if task.done()]
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        assert "--max-client-share" in refused.json()["error"]["message"]
        other = send("b")
        go.set()
        assert (await other).status_code == 404
        health = await server.http.get("/health")
        assert (health.status_code, health.content) == (200, b"")  # the store works
        await asyncio.gather(*waiting)


def test_the_default_leaves_room() -> None:
    shares = Shares(64, SHARE)
    assert 32 < shares.most < 64
