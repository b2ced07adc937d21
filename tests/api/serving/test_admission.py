"""Admission: a request is refused with 503 before any work if the queue is full."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from tests.support.fake_core import FakeCore
from tests.support.server import running_server, until

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
        await until(lambda: server.services.models[0].client.held == 0)
        assert (await server.post(COMPLETIONS, {"prompt": "x", "n": 6})).status_code == 200


async def test_the_openai_client_comes_again(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, capacity=1) as server:
        first = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "x"}))
        await until(lambda: core.active)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5) as client:
            second = asyncio.create_task(client.completions.create(model="fake", prompt="again"))
            await until(lambda: server.services.in_flight == 1)
            core.hold.clear()
            assert (await second).choices[0].text == "AGAIN"
        await first
