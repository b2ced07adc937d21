"""Timeouts of requests, and the timings that are returned in `metrics`."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.stream import GenerateRequest
from quire.serving.generation import collect
from tests.support.fake_core import FakeCore, prompt_of, running_client
from tests.support.server import Server, running_server, until

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
}


async def frees_its_place(server: Server, core: FakeCore) -> None:
    core.allow(1)
    await until(lambda: not core.active)
    await until(lambda: server.state.models[0].client.slots_in_use == 0)


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_is_given_up_in_time(tmp_path: Path, path: str) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        answer = await server.post(path, {**PATHS[path], "timeout": 0.05})
        assert answer.status_code == 408
        assert answer.json()["error"]["type"] == ("server_error" if path == "/v1/responses" else "TimeoutError")
        await frees_its_place(server, core)


async def test_the_server_has_a_limit_too(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core, request_timeout=0.05) as server:
        body = {**PATHS["/v1/completions"], "timeout": 1000}
        assert (await server.post("/v1/completions", body)).status_code == 408
        streamed = await server.post("/v1/completions", {**body, "stream": True})
        events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
        assert json.loads(events[-2])["error"]["code"] == 408
        await frees_its_place(server, core)


async def test_an_answer_in_time_is_whole(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = (await server.post("/v1/completions", {"prompt": "abc", "timeout": 20})).json()
    assert body["choices"][0]["text"] == "ABC"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_timings_are_returned_on_request(tmp_path: Path, path: str) -> None:
    async with running_server(tmp_path) as server:
        whole = (await server.post(path, {**PATHS[path], "return_metrics": True, "n": 2})).json()
        streamed = await server.post(path, {**PATHS[path], "return_metrics": True, "stream": True})
        plain = (await server.post(path, PATHS[path])).json()
    last = json.loads(streamed.text.split("\n\n")[-3].removeprefix("data: "))
    assert last["choices"] == []
    for metrics in (whole["metrics"], last["metrics"]):
        assert 0 <= metrics["queue_time_ms"] <= metrics["time_to_first_token_ms"] < 60_000
        phases = sum(metrics[f"{name}_time_ms"] for name in ("preprocess", "queue", "prefill"))
        assert phases == pytest.approx(metrics["time_to_first_token_ms"])
        assert metrics["generation_time_ms"] >= 0
        assert metrics["tokens_per_second"] > 0
    assert plain["metrics"] is None


async def test_many_sequences_do_not_start_all_at_once() -> None:
    core = FakeCore()
    async with running_client(core, capacity=500) as client:
        request = GenerateRequest(prompt=prompt_of("x"), params=SamplingParams(max_tokens=1))
        work = asyncio.ensure_future(collect(client, [request] * 400))
        seen = [0]
        while not work.done():
            await asyncio.sleep(0)
            seen.append(client.open_streams)
        assert len(await work) == 400
    assert max(later - earlier for earlier, later in pairwise(seen)) <= 64
