"""/score and /rerank, by every way to compare texts."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.api.pooling import scoring
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import PooledArray
from tests.support.fake_core import FakeCore
from tests.support.pooling_server import added, pooling_server, texts, vectors
from tests.support.raw import connected, post
from tests.support.server import until

QUERY, DOCUMENTS = "cat", ["dog", "the cat sat", "act", "zzz"]
PROMPTS = {"prompts": {"query": "Instruct: find\nQuery: ", "document": "d: "}}
PAIRS = [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")]


async def scores_of(server: Any, first: Any, second: Any, **fields: Any) -> list[float]:
    answer = await server.post("/score", {"text_1": first, "text_2": second, **fields})
    assert answer.status_code == 200, answer.text
    return [entry["score"] for entry in answer.json()["data"]]


@pytest.mark.parametrize("names", PAIRS)
async def test_one_or_many_are_compared_with_many(tmp_path: Path, names: tuple[str, str]) -> None:
    async with pooling_server(tmp_path, joins=True) as server:

        async def ask(first: Any, second: Any) -> Any:
            return await server.post("/v1/score", {names[0]: first, names[1]: second})

        single = (await ask("cat", "act")).json()
        assert (single["object"], single["data"][0]["object"], single["data"][0]["index"]) == ("list", "score", 0)
        many = (await ask("cat", DOCUMENTS)).json()
        assert [entry["index"] for entry in many["data"]] == [0, 1, 2, 3]
        assert many["data"][2]["score"] == single["data"][0]["score"]
        assert (await ask(["cat"], DOCUMENTS)).json()["data"] == many["data"]
        assert (await ask(["cat"] * 4, DOCUMENTS)).json()["data"] == many["data"]
        parts = {"content": [{"type": "text", "text": "cat"}]}
        assert (await ask(parts, [{"text": text} for text in DOCUMENTS])).json()["data"] == many["data"]
        wrong = await ask(["cat"] * 2, DOCUMENTS)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, names[1])
        assert "1:1, 1:N or N:N, not 2:4" in wrong.json()["error"]["message"]


async def test_a_cross_encoder_gets_pairs(tmp_path: Path) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, "score", core=core, joins=True) as server:
        raw = await scores_of(server, "cat", "act", use_activation=False)
        (score,) = await scores_of(server, "cat", "act")
    assert score == pytest.approx(1 / (1 + np.exp(-raw[0])), abs=1e-6)
    first, second = added(core)
    assert texts(core)[0] == "<|im_start|>cat<|im_end|>act<|im_end|>"
    assert first.second_text_start == 5
    assert (first.params, second.params) == (
        PoolingParams(task="score", use_activation=False),
        PoolingParams(task="score"),
    )


async def test_a_tokenizer_without_token_types_has_no_second_segment(tmp_path: Path) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, "score", core=core) as server:
        await scores_of(server, "cat", "act")
    assert added(core)[0].second_text_start is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 9}, "<|im_start|>abc<|im_end|>vwx<|im_end|>"),
        ({"truncate_prompt_tokens": 8}, "<|im_start|>ab<|im_end|>vwx<|im_end|>"),
        ({"truncate_prompt_tokens": 9, "truncation_side": "left"}, "<|im_start|>cde<|im_end|>xyz<|im_end|>"),
        ({"max_tokens_per_doc": 2}, "<|im_start|>abcde<|im_end|>vw<|im_end|>"),
        ({"max_tokens_per_query": 1}, "<|im_start|>a<|im_end|>vwxyz<|im_end|>"),
    ],
)
async def test_pairs_are_cut(tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, "score", core=core, joins=True) as server:
        await scores_of(server, "abcde", "vwxyz", **fields)
    assert texts(core) == [expected]


@pytest.mark.parametrize("lengths", [(3, 9), (9, 3), (6, 6), (7, 5), (1, 20)])
@pytest.mark.parametrize("limit", [6, 7, 12])
async def test_pairs_are_cut_as_by_transformers(tmp_path: Path, lengths: tuple[int, int], limit: int) -> None:
    core = FakeCore()
    first, second = "abcdefghij"[: lengths[0]], ("klmnopqrstuvwxyz" * 2)[: lengths[1]]
    async with pooling_server(tmp_path, "score", core=core, joins=True) as server:
        await scores_of(server, first, second, truncate_prompt_tokens=limit)
        tokenizer = server.state.models[0].renderer.tokenizer.backend
    tokenizer.enable_truncation(limit, strategy="longest_first")
    assert added(core)[0].prompt.tolist() == tokenizer.encode(first, second).ids


@pytest.mark.parametrize("method", ["cosine", "dot"])
async def test_bi_encoders_compare_embeddings(tmp_path: Path, method: str) -> None:
    core = FakeCore()
    files = {"config_sentence_transformers.json": PROMPTS}
    async with pooling_server(tmp_path, "embed", core=core, files=files, facts={"score_method": method}) as server:
        scores = await scores_of(server, QUERY, DOCUMENTS)
        assert texts(core) == ["Instruct: find\nQuery: cat", *(f"d: {text}" for text in DOCUMENTS)]
        query = {"input": QUERY, "prompt_name": "query"}
        documents = {"input": DOCUMENTS, "prompt_name": "document"}
        first, second = [vectors((await server.post("/v1/embeddings", body)).json()) for body in (query, documents)]
        assert np.allclose(scores, (second @ first.T)[:, 0], atol=1e-6)
        await scores_of(server, QUERY, "dog", instruction="look")
        assert texts(core)[-2] == "Instruct: look\nQuery: cat"
        each = await scores_of(server, [QUERY, "act"], DOCUMENTS[:2])
        assert each[0] == scores[0]
        answer = await server.post("/score", {"text_1": "a", "text_2": "b", "use_activation": True})
        assert answer.headers["x-quire-ignored-fields"] == "use_activation"
        long = await server.post("/score", {"text_1": "a", "text_2": ["b", "c" * 600]})
        assert long.json()["error"]["param"] == "text_2[1]"
        cut = await server.post("/rerank", {"query": "a", "documents": ["b", "c" * 600], "max_tokens_per_doc": 5})
        assert cut.status_code == 200
        assert texts(core)[-1] == "d: cc"


async def test_sparse_embeddings_are_compared(tmp_path: Path) -> None:
    facts = {"score_method": "dot", "sparse": True, "embedding_size": 30_000}
    async with pooling_server(tmp_path, "embed", facts=facts) as server:
        assert await scores_of(server, "aab", ["ab", "b", "c"]) == [3.0, 1.0, 0.0]
        assert len(await scores_of(server, "aab", ["ab"] * 600)) == 600


async def test_late_interaction_compares_tokens(tmp_path: Path) -> None:
    async with pooling_server(tmp_path, "token_embed", facts={"score_method": "max_sim"}) as server:
        scores = await scores_of(server, QUERY, DOCUMENTS)

        async def tokens(text: str) -> Any:
            body = {"input": text, "task": "token_embed"}
            return np.array((await server.post("/pooling", body)).json()["data"][0]["data"], np.float32)

        query = await tokens(QUERY)
        expected = [(query @ (await tokens(text)).T).max(axis=1).sum() for text in DOCUMENTS]
        assert np.allclose(scores, expected, atol=1e-5)
        assert (await scores_of(server, [QUERY, "zzz"], DOCUMENTS[:2]))[0] == pytest.approx(scores[0])
        usage = (await server.post("/score", {"text_1": "ab", "text_2": ["c", "d"]})).json()["usage"]
        assert usage["prompt_tokens"] == 4


async def test_many_tokens_are_compared_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million similarities for each document of 512 tokens; smaller blocks have the same result."""
    threads = []
    compare = scoring._max_sim

    def compared(query: PooledArray, document: PooledArray) -> PooledArray:
        threads.append(threading.current_thread().name)
        return compare(query, document)

    monkeypatch.setattr(scoring, "_max_sim", compared)
    text, core = "abcdefgh" * 64, FakeCore()
    async with pooling_server(tmp_path, "token_embed", core=core, facts={"score_method": "max_sim"}) as server:
        short, *long = await scores_of(server, text, ["b", text, text[:500]])
        assert threads[0] == threading.current_thread().name
        assert all(name.startswith("quire-score") for name in threads[1:])
        monkeypatch.setattr(scoring, "_SIMILARITIES", 1000)
        assert await scores_of(server, text, ["b", text, text[:500]]) == pytest.approx([short, *long])

        hold = threading.Event()
        monkeypatch.setattr(scoring, "_max_sim", lambda *_: np.zeros(1 + (not hold.wait(60)), np.float32))
        client = server.state.models[0].client
        async with connected(server) as raw:
            await raw.send(post({"query": text, "documents": [text] * 200}, path="/rerank"))
            await until(lambda: client.slots_in_use == client.capacity // 2)
            await until(lambda: not core.active)
            assert len(added(core)) < 100  # those that wait hold their slots
        await until(lambda: client.slots_in_use == client.open_streams == server.state.in_flight == 0)
        hold.set()


async def test_query_and_documents_share_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents are computed after the query, and have the time that it has left."""
    loop, time_of, core = asyncio.get_running_loop(), time.monotonic, FakeCore()
    core.hold.set()
    async with pooling_server(tmp_path, "token_embed", core=core, facts={"score_method": "max_sim"}) as server:
        body = {"text_1": "cat", "text_2": ["act", "dog"], "timeout": 50}
        asked = asyncio.create_task(server.post("/score", body))
        await until(lambda: len(added(core)) == 1)
        monkeypatch.setattr(loop, "time", lambda: time_of() + 30)
        core.allow(1)
        await until(lambda: len(added(core)) == 3)
        monkeypatch.setattr(loop, "time", lambda: time_of() + 60)
        for _ in range(100):
            await asyncio.sleep(0)
        core.hold.clear()  # if there was still time, all would be answered
        answer = await asked
        assert answer.status_code == 408
        assert "timed out after 50 seconds" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ordered(tmp_path: Path, path: str) -> None:
    async with pooling_server(tmp_path, "score", joins=True) as server:
        body = {"model": "fake", "query": QUERY, "documents": DOCUMENTS}
        answer = (await server.post(path, body)).json()
        scores = [result["relevance_score"] for result in answer["results"]]
        assert scores == sorted(scores, reverse=True)
        assert scores == sorted(await scores_of(server, QUERY, DOCUMENTS), reverse=True)
        assert {result["index"] for result in answer["results"]} == {0, 1, 2, 3}
        assert all(result["document"] == {"text": DOCUMENTS[result["index"]]} for result in answer["results"])
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
        assert answer["meta"]["billed_units"] == {"search_units": 1}
        assert answer["id"].startswith("rerank-")
        best = (await server.post(path, {**body, "top_n": 2, "return_documents": False})).json()["results"]
        assert best == [{key: result[key] for key in ("index", "relevance_score")} for result in answer["results"][:2]]
        many = (await server.post(path, {**body, "top_n": 100})).json()["results"]
        assert many == answer["results"]


@pytest.mark.parametrize(
    ("body", "param", "complaint"),
    [
        ({"documents": ["a"]}, "query", "required"),
        ({"query": "a"}, "documents", "required"),
        ({"query": "a", "documents": []}, "documents", "empty"),
        ({"query": "a", "documents": ["b", 5]}, "documents[1]", "text"),
        ({"query": "a", "documents": ["b", {"content": [{"type": "image_url"}]}]}, "documents[1].content[0]", "text"),
        ({"query": ["a"], "documents": ["b"]}, "query", "text"),
        ({"query": "a", "documents": ["b", "c" * 600]}, "documents[1]", "Please reduce the length of the input prompt"),
        ({"query": "a", "documents": ["b"] * 2049}, "documents", "at most 2048"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than or equal"),
        ({"query": "a", "documents": ["b"], "instruction": "x"}, "instruction", "is not supported"),
        (
            {"query": "a", "documents": ["b"], "chat_template_kwargs": {"x": 1}},
            "chat_template_kwargs",
            "is not supported",
        ),
    ],
)
async def test_what_is_wrong_with_a_rerank_is_named(
    tmp_path: Path, body: dict[str, Any], param: str, complaint: str
) -> None:
    async with pooling_server(tmp_path, "score", joins=True) as server:
        answer = await server.post("/rerank", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert complaint in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text_1": "a"},
        {"queries": "a", "text_2": "b"},
        {"text_1": "a", "text_2": "b", "items": "c"},
        {"queries": "a", "documents": "b", "items": "c"},
        {"text_1": [], "text_2": "b"},
        {"text_1": "a", "text_2": []},
        {"text_1": "a", "text_2": [1]},
        {"text_1": None, "text_2": "b"},
    ],
)
async def test_a_score_needs_two_sides_of_one_pair(tmp_path: Path, body: dict[str, Any]) -> None:
    async with pooling_server(tmp_path, "score") as server:
        assert (await server.post("/score", body)).status_code == 400


SCORE_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'query' %}Q: {{ m.content }}\n{% elif m.role == 'document' %}"
    "D: {{ m.content }} {{ mark }}{% else %}S: {{ m.content }}\n{% endif %}{% endfor %}?"
)


async def test_a_causal_reranker_has_a_chat_template(tmp_path: Path) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, "score", core=core, chat_template=SCORE_TEMPLATE) as server:
        body = {"query": "a", "documents": ["b", "c"], "instruction": "find", "chat_template_kwargs": {"mark": "!"}}
        assert (await server.post("/rerank", body)).status_code == 200
        assert texts(core) == ["S: find\nQ: a\nD: b !?", "S: find\nQ: a\nD: c !?"]
        long = {"query": "a", "documents": ["abcdef"], "truncate_prompt_tokens": 13}
        assert (await server.post("/rerank", long)).status_code == 200
        assert texts(core)[-1] == "Q: a\nD: abc ?"  # the document is cut, not what follows it
        hopeless = await server.post("/rerank", {**long, "truncate_prompt_tokens": 5})
        assert hopeless.json()["error"]["param"] == "documents[0]"
        long = {"query": "a", "documents": ["x", "y" * 600]}
        assert (await server.post("/rerank", long)).json()["error"]["param"] == "documents[1]"


async def test_qwen3_rerankers_have_the_prompt_of_their_training(tmp_path: Path) -> None:
    core = FakeCore()
    files = {"config.json": {"model_type": "qwen3"}}
    async with pooling_server(tmp_path, "score", core=core, files=files) as server:
        body = {"query": "a", "documents": ["b"]}
        assert (await server.post("/rerank", body)).status_code == 200
        assert (await server.post("/rerank", {**body, "instruction": "look"})).status_code == 200
    first, second = texts(core)
    assert first.startswith("<|im_start|>system\nJudge whether the Document meets the requirements")
    assert first.endswith("<Query>: a\n<Document>: b<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "<Instruct>: Given a web search query, retrieve relevant passages" in first
    assert "<Instruct>: look\n<Query>: a" in second
