"""Admission: a request is refused with 503 before any work if the queue is full."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.api.responses.errors import StoreFailed
from quire.api.responses.store import ResponseStore
from quire.engine.client.engine import Engine
from quire.parsing.structured.checker import GrammarChecker
from quire.rendering.renderer import Renderer
from tests.support.fake_core import FakeCore
from tests.support.server import Server, running_server, until

COMPLETIONS = "/v1/completions"


async def test_more_than_the_queue_takes_is_answered_503_with_retry_after(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, capacity=3) as server:
        tasks = [asyncio.create_task(server.post(COMPLETIONS, {"prompt": "x"})) for _ in range(3)]
        await until(lambda: len(core.active) == 3)
        answer = await server.post(COMPLETIONS, {"prompt": "x"})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        never = await server.post(COMPLETIONS, {"prompt": "x", "n": 4})
        assert never.status_code == 400
        core.hold.clear()
        assert [(await task).status_code for task in tasks] == [200] * 3
        assert (await server.post(COMPLETIONS, {"prompt": "x"})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_burst_does_not_pass_the_queues_length(tmp_path: Path, stream: bool) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, capacity=6) as server:
        body = {"prompt": "x", "n": 2, "stream": stream}
        tasks = [asyncio.create_task(server.post(COMPLETIONS, body)) for _ in range(20)]
        await until(lambda: sum(task.done() for task in tasks) == 17)
        core.hold.clear()
        assert sorted([(await task).status_code for task in tasks]) == [200] * 3 + [503] * 17
        await until(lambda: server.state.models[0].client.slots_in_use == 0)
        assert (await server.post(COMPLETIONS, {"prompt": "x", "n": 6})).status_code == 200


async def test_the_openai_client_comes_again(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, capacity=1) as server:
        first = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "x"}))
        await until(lambda: core.active)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5) as client:
            second = asyncio.create_task(client.completions.create(model="fake", prompt="again"))
            await until(lambda: server.state.in_flight == 1)
            core.hold.clear()
            assert (await second).choices[0].text == "AGAIN"
        await first


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["x", "y"], "n": 2},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"n": 2}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "n": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8},
    "/v1/responses": {"input": "x"},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": {"type": "object"}}}
STRUCTURED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"response_format": SCHEMA},
    "/inference/v1/generate": {"sampling_params": {"n": 2, "structured_outputs": {"json": {"type": "object"}}}},
    "/v1/chat/completions": {"response_format": SCHEMA},
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    "/v1/responses": {"text": {"format": {"type": "json_schema", "name": "city", "schema": {"type": "object"}}}},
}


def client_of(server: Server) -> Engine:
    return server.state.models[0].client


@contextmanager
def full_queue(server: Server) -> Iterator[None]:
    """Use all slots."""
    client = client_of(server)
    with client.slots(client.capacity):
        yield


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, fields) for path in REQUESTS for fields in ({}, {"stream": True})),
        ("/v1/responses", {"background": True}),
    ],
)
async def test_a_full_queue_refuses_before_any_work(
    tmp_path: Path, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    work: list[str] = []

    def forbidden(name: str) -> Callable[..., Any]:
        async def count(*_: Any, **__: Any) -> Any:
            work.append(name)
            raise AssertionError(name)

        return count

    for owner, method in ((Renderer, "text"), (Renderer, "chat"), (GrammarChecker, "check"), (ResponseStore, "load")):
        monkeypatch.setattr(owner, method, forbidden(method))
    async with running_server(tmp_path, FakeCore(), capacity=4) as server:
        with full_queue(server):
            answer = await server.post(path, {**REQUESTS[path], **STRUCTURED[path], **fields})
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) >= 1
        assert not work
        assert client_of(server).slots_in_use == 0


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_prompt_that_cannot_be_rendered_is_refused_for_the_queue_first(tmp_path: Path, path: str) -> None:
    async with running_server(tmp_path, FakeCore(), capacity=4, chat_template="{{ raise_exception('no') }}") as server:
        body = {**REQUESTS[path], **({"truncate_prompt_tokens": 10**6} if path == "/v1/completions" else {})}
        if path == "/inference/v1/generate":
            body = {**body, "token_ids": [10**6]}
        with full_queue(server):
            assert (await server.post(path, body)).status_code == 503
        assert (await server.post(path, body)).status_code == 400
        assert client_of(server).slots_in_use == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
async def test_slots_come_back_after_an_answer(tmp_path: Path, path: str, stream: bool) -> None:
    async with running_server(tmp_path, FakeCore(), capacity=4) as server:
        for _ in range(2):
            answer = await server.post(path, {**REQUESTS[path], "stream": stream})
            assert answer.status_code == 200, answer.text
            await until(lambda: client_of(server).slots_in_use == 0)


@pytest.mark.parametrize("where", ["before the headers", "after the headers"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
async def test_slots_come_back_if_nobody_reads_the_answer(tmp_path: Path, path: str, stream: bool, where: str) -> None:
    """The client has gone when the response begins, and sending to it fails."""
    async with running_server(tmp_path, FakeCore(), capacity=4) as server:
        body = iter([{"type": "http.request", "body": json.dumps({**REQUESTS[path], "stream": stream}).encode()}])
        sent: list[str] = []

        async def receive() -> Any:
            return next(body, {"type": "http.disconnect"})

        async def send(message: Any) -> None:
            assert client_of(server).slots_in_use or not stream
            sent.append(message["type"])
            if where == "before the headers" or len(sent) > 1:
                raise OSError("the connection is closed")

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
            "state": {"request_id": "r"},
        }
        with suppress(OSError, ExceptionGroup):
            await server.app(scope, receive, send)
        assert sent
        assert client_of(server).slots_in_use == 0
        assert client_of(server).open_streams == 0


async def test_slots_come_back_after_a_background_response(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, capacity=2) as server:
        body = {"input": "x", "background": True}
        cancelled, finished = [(await server.post("/v1/responses", body)).json()["id"] for _ in range(2)]
        assert client_of(server).slots_in_use == 2
        assert (await server.post("/v1/responses", body)).status_code == 503
        await server.post(f"/v1/responses/{cancelled}/cancel")
        assert client_of(server).slots_in_use == 1
        core.hold.clear()
        await until(lambda: client_of(server).slots_in_use == 0)
        assert (await server.http.get(f"/v1/responses/{finished}")).json()["status"] == "completed"


async def test_slots_come_back_if_a_background_response_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise StoreFailed("full")

    monkeypatch.setattr(ResponseStore, "save", fail)
    async with running_server(tmp_path, FakeCore(), capacity=1) as server:
        for _ in range(2):
            answer = await server.post("/v1/responses", {"input": "x", "background": True})
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, "full")
            assert client_of(server).slots_in_use == 0


async def test_too_many_answers_are_refused_as_such(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(), capacity=4, max_n=3, max_prompts=2) as server:
        with full_queue(server):
            for body, param in (
                ({"prompt": "x", "n": 4}, "n"),
                ({"prompt": ["x"] * 3}, "prompt"),
                ({"prompt": []}, "prompt"),
            ):
                answer = await server.post(COMPLETIONS, body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
