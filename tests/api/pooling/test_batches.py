"""Large batches beside other clients, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from quire.api.pooling import responses
from quire.api.pooling.arrays import Floats, json_of
from quire.protocol.pooling.requests import EmbedDtype
from quire.serving.result_memory import ResultMemory
from tests.support.fake_core import FakeCore
from tests.support.pooling_server import added, pooling_server, vectors
from tests.support.raw import connected, post, silent
from tests.support.server import until

PATH = "/v1/embeddings"
TEXTS = [f"text number {i}" for i in range(2048)]


async def test_2048_inputs_run_with_a_few_slots(tmp_path: Path) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, core=core, capacity=4) as server:
        answer = await server.post(PATH, {"input": TEXTS})
        assert answer.status_code == 200, answer.text
        actual = vectors(answer.json())
        some = vectors((await server.post(PATH, {"input": [TEXTS[0], TEXTS[2047]]})).json())
    assert actual.shape[0] == 2048
    assert np.array_equal(actual[[0, 2047]], some)
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


async def test_what_a_client_does_not_read_is_not_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it hold a slot; its results are held until it has gone."""
    encoded = []

    def counted(values: Floats, dtype: EmbedDtype) -> Iterator[bytes]:
        encoded.append(values.size)
        return json_of(values, dtype)

    monkeypatch.setattr(responses, "json_of", counted)
    async with pooling_server(tmp_path, facts={"embedding_size": 1024}) as server:
        state = server.state
        with silent(server, post({"input": TEXTS}, path=PATH)):
            await until(lambda: state.results.held == 2048 * 1024)
            await until(lambda: encoded)
            await until(lambda: state.models[0].client.slots_in_use == 0)
            for _ in range(100):
                assert (await server.http.get("/health")).status_code == 200
            assert len(encoded) < 500
            assert state.in_flight == 1
        await until(lambda: state.in_flight == state.results.held == 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"input": TEXTS}),
        (PATH, {"input": TEXTS, "encoding_format": "base64", "embed_dtype": "float16"}),
        ("/pooling", {"input": TEXTS, "task": "token_embed", "encoding_format": "bytes_only"}),
        ("/classify", {"input": TEXTS}),
        ("/predict", {"inputs": [[text] for text in TEXTS]}),
        ("/v2/embed", {"texts": TEXTS, "embedding_types": ["float", "base64"]}),
        ("/embed_sparse", {"inputs": TEXTS}),
        ("/rerank", {"query": "a", "documents": [text * 10 for text in TEXTS]}),
        ("/rerank", {"query": "a", "texts": [text * 10 for text in TEXTS], "return_text": True}),
    ],
)
async def test_large_answers_are_complete(tmp_path: Path, path: str, body: Any) -> None:
    """They come in pieces and without a length; small ones have a length."""
    async with pooling_server(tmp_path, joins=True, facts={"sparse": path == "/embed_sparse"}) as server:
        whole = await server.post(path, body)
        assert whole.status_code == 200
        assert len(whole.content) > 1 << 17
        assert "content-length" not in whole.headers
        name, texts = next((name, value) for name, value in body.items() if isinstance(value, list))
        if name == "embedding_types":
            name, texts = "texts", TEXTS
        answer_to_one = await server.post(path, {**body, name: texts[:1]})
        assert int(answer_to_one.headers["content-length"]) == len(answer_to_one.content)
        if path == "/pooling":
            assert whole.content.startswith(answer_to_one.content)
        else:
            assert count_of(whole.json()) == 2048
            assert count_of(answer_to_one.json()) == 1
        assert server.state.results.held == 0


def count_of(answer: Any) -> int:
    """The number of results in an answer."""
    if isinstance(answer, list):
        return len(answer)
    if "embeddings" in answer:
        counts = {len(answer["texts"]), *map(len, answer["embeddings"].values())}
        assert len(counts) == 1
        return counts.pop()
    return len(answer["results" if "results" in answer else "data"])


async def test_results_that_are_not_read_leave_room_for_others(tmp_path: Path) -> None:
    async with pooling_server(tmp_path, facts={"embedding_size": 1024}) as server:
        server.state.results = results = ResultMemory(5 * 2048 * 1024, share=0.5)
        body = post({"input": TEXTS}, path=PATH)
        with silent(server, body), silent(server, body):
            await until(lambda: results.held == 2 * 2048 * 1024)
            refused = await server.post(PATH, {"input": TEXTS})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
            assert (await server.post(PATH, {"input": "one"})).status_code == 200
            assert (await server.post(PATH, {"input": TEXTS, "dimensions": 4096})).status_code == 400
            results.take("another client", 2048 * 1024)
            results.give_back("another client", 2048 * 1024)
        await until(lambda: results.held == 0)
        assert (await server.post(PATH, {"input": TEXTS})).status_code == 200
        await until(lambda: results.held == 0)
        failed = await server.post(PATH, {"input": TEXTS, "timeout": 0.001})
        assert (failed.status_code, results.held) == (408, 0)
