"""Streams: clients that leave, silence, and many at once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from quire.engine.client.protocol import AddRequest
from tests.support.fake_core import FakeCore, says
from tests.support.server import chunks_of, running_server, until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = {"prompt": "x", "max_tokens": 400}


async def test_a_client_that_leaves_a_stream_frees_its_request(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 400))
    core.hold.set()
    core.allow(3)
    async with running_server(tmp_path, core) as server:
        async with server.http.stream("POST", COMPLETIONS, json={**LONG, "n": 3, "stream": True}) as answer:
            await anext(answer.aiter_bytes())
            assert server.state.in_flight == 1
        await until(lambda: not core.active)
        await until(lambda: server.state.in_flight == 0)
        await until(lambda: server.state.models[0].client.slots_in_use == 0)
        assert server.state.models[0].client.open_streams == 0


async def test_a_silent_stream_shows_that_it_is_alive(tmp_path: Path) -> None:
    core = FakeCore(answer=says("late"))
    core.hold.set()
    async with running_server(tmp_path, core, sse_keep_alive_interval=0.02) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with server.http.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            core.hold.clear()
            core.allow(10)
            remaining = [line async for line in lines]
    assert remaining[-2] == "data: [DONE]"
    assert "late" in "".join(json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in remaining
                             if line.startswith("data: {"))  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_any_answer_frees_its_request(tmp_path: Path, stream: bool) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        task = asyncio.create_task(
            server.post(CHAT, {"messages": [{"role": "user", "content": "x"}], "stream": stream})
        )
        await until(lambda: core.active)
        task.cancel()
        await until(lambda: not core.active)
        await until(lambda: server.state.in_flight == 0)
        await until(lambda: server.state.models[0].client.slots_in_use == 0)


async def test_many_streams_at_once_stay_apart(tmp_path: Path) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core, capacity=100) as server:
        texts = [f"text number {i}" for i in range(60)]
        answers = await asyncio.gather(
            *(server.post(COMPLETIONS, {"prompt": text, "stream": True, "max_tokens": 50}) for text in texts)
        )
        for text, answer in zip(texts, answers, strict=True):
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks_of(answer.text)) == text.upper()
    assert len([message for message in core.received if isinstance(message, AddRequest)]) == 60
