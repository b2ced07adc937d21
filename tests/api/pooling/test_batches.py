"""Large batches beside other clients, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.fake_core import FakeCore
from tests.support.pooling_server import added, pooling_server, vectors
from tests.support.raw import connected, post
from tests.support.server import until

PATH = "/v1/embeddings"
TEXTS = [f"text number {i}" for i in range(2048)]


async def test_2048_inputs_run_with_a_few_slots(tmp_path: Path) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, core=core, capacity=4) as server:
        answer = await server.post(PATH, {"input": TEXTS})
        assert answer.status_code == 200, answer.text
        found = vectors(answer.json())
        some = vectors((await server.post(PATH, {"input": [TEXTS[0], TEXTS[2047]]})).json())
    assert found.shape[0] == 2048
    assert np.array_equal(found[[0, 2047]], some)
    assert len({message.flow for message in added(core)[:2048]}) == 1


async def test_single_requests_are_not_refused_beside_batches(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with pooling_server(tmp_path, core=core, capacity=32) as server:
        batches = [asyncio.create_task(server.post(PATH, {"input": TEXTS[:500]})) for _ in range(8)]
        client = server.state.models[0].client
        await until(lambda: client.slots_in_use >= 16 and server.state.in_flight == 8)
        single = asyncio.create_task(server.post(PATH, {"input": "one"}))
        await until(lambda: len({message.flow for message in added(core)}) == 9)
        core.hold.clear()
        assert {(await task).status_code for task in [*batches, single]} == {200}
        await until(lambda: client.slots_in_use == 0)


async def test_more_requests_than_slots_are_refused_with_retry_after(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with pooling_server(tmp_path, core=core, capacity=2) as server:
        first = [asyncio.create_task(server.post(PATH, {"input": "a"})) for _ in range(2)]
        await until(lambda: len(core.active) == 2)
        refused = await server.post("/rerank", {"query": "a", "documents": ["b"]})
        core.hold.clear()
        await asyncio.gather(*first)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0


@pytest.mark.parametrize("clients", [200, pytest.param(2000, marks=pytest.mark.slow)])
async def test_clients_that_go_away_leave_nothing(tmp_path: Path, clients: int) -> None:
    """Each sends a batch and disconnects: while it waits, or while texts are tokenized."""
    core = FakeCore()
    core.hold.set()
    async with pooling_server(tmp_path, core=core, capacity=4096) as server:
        client = server.state.models[0].client
        body = post({"input": TEXTS[:40]}, path=PATH)
        rerank = post({"query": "a", "documents": TEXTS[:40]}, path="/rerank")

        async def leave(number: int) -> None:
            async with connected(server) as raw:
                await raw.send(rerank if number % 4 == 0 else body)
                if number % 2:
                    await until(lambda: server.state.in_flight > 0)

        for start in range(0, clients, 100):
            await asyncio.gather(*(leave(number) for number in range(start, start + 100)))
        await until(lambda: server.state.in_flight == 0)
        assert client.slots_in_use == client.open_streams == 0
        core.hold.clear()
        await until(lambda: not core.active)
        assert (await server.post(PATH, {"input": "a"})).status_code == 200


async def test_a_request_has_a_time_limit(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with pooling_server(tmp_path, core=core) as server:
        for path, body in ((PATH, {"input": ["a", "b"]}), ("/score", {"text_1": "a", "text_2": "b"})):
            answer = await server.post(path, {**body, "timeout": 0.02})
            assert answer.status_code == 408
        await until(lambda: not core.active)


async def test_an_engine_that_dies_is_a_503(tmp_path: Path) -> None:
    core = FakeCore(die_at_step=1)
    async with pooling_server(tmp_path, core=core) as server:
        answer = await server.post(PATH, {"input": TEXTS[:100]})
        assert answer.status_code == 503
        assert (await server.post(PATH, {"input": "a"})).status_code == 503


async def test_other_requests_run_while_a_large_answer_is_written(tmp_path: Path) -> None:
    """2,048 embeddings of 1,024 numbers: 20 MB of JSON."""
    facts = {"embedding_size": 1024}
    async with pooling_server(tmp_path, facts=facts) as server:
        done = asyncio.Event()
        gaps: list[float] = []

        async def watch() -> None:
            loop = asyncio.get_running_loop()
            last = loop.time()
            while not done.is_set():
                await asyncio.sleep(0)
                gaps.append(loop.time() - last)
                last = loop.time()

        watching = asyncio.create_task(watch())
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            content = (await http.post(PATH, content=json.dumps({"input": TEXTS}).encode(),
                                       headers={"content-type": "application/json"})).content  # fmt: skip
        done.set()
        await watching
    assert len(content) > 10_000_000
    assert len(gaps) > 100  # the event loop had many turns
