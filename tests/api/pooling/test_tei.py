"""Endpoints of Text Embeddings Inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_core import FakeCore
from tests.support.pooling import LABELS, TOKEN_SIZE
from tests.support.pooling_server import pooling_server, texts


async def test_embeddings_are_bare_lists(tmp_path: Path) -> None:
    files = {"config_sentence_transformers.json": {"prompts": {"query": "q: "}}}
    core = FakeCore()
    async with pooling_server(tmp_path, core=core, files=files) as server:
        single = (await server.post("/embed", {"inputs": "hello"})).json()
        two = (await server.post("/embed", {"inputs": ["hello", "world"]})).json()
        assert single[0] == two[0]
        assert np.allclose(np.linalg.norm(two, axis=1), 1)
        assert np.linalg.norm((await server.post("/embed", {"inputs": "hello", "normalize": False})).json()) > 2
        assert np.shape((await server.post("/embed", {"inputs": [[1, 2], [3]], "dimensions": 4})).json()) == (2, 4)
        await server.post("/embed", {"inputs": "hello", "prompt_name": "query"})
        assert texts(core)[-1] == "q: hello"
        assert (await server.post("/", {"inputs": "hello"})).json() == single
        by_token = (await server.post("/embed_all", {"inputs": ["ab", "c"]})).json()
        assert [np.shape(array) for array in by_token] == [(2, TOKEN_SIZE), (1, TOKEN_SIZE)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, "<|im_start|>abc"), ({"truncation_direction": "Left"}, "<|im_start|>fgh"), ({"truncate": False}, None)],
)
async def test_long_texts_are_cut_if_wanted(tmp_path: Path, fields: dict[str, Any], expected: str | None) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, core=core, joins=True, max_model_len=5) as server:
        answer = await server.post("/embed", {"inputs": ["a", "abcdefgh"], "truncate": True, **fields})
    if expected is None:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "inputs[1]")
    else:
        assert answer.status_code == 200
        assert texts(core)[1] == f"{expected}<|im_end|>"


async def test_sparse_embeddings_have_what_is_not_zero(tmp_path: Path) -> None:
    async with pooling_server(tmp_path, "embed", facts={"sparse": True, "embedding_size": 261}) as server:
        (values,) = (await server.post("/embed_sparse", {"inputs": [[5, 5, 7]]})).json()
        assert values == [{"index": 5, "value": 2.0}, {"index": 7, "value": 1.0}]
    async with pooling_server(tmp_path, "embed") as server:
        assert "not sparse" in (await server.post("/embed_sparse", {"inputs": "a"})).json()["error"]["message"]


@pytest.mark.parametrize("path", ["/rerank", "/"])
async def test_texts_are_ranked(tmp_path: Path, path: str) -> None:
    async with pooling_server(tmp_path, "score", joins=True) as server:
        body = {"query": "cat", "texts": ["dog", "cat", "act"]}
        ranks = (await server.post(path, body)).json()
        assert sorted(rank["index"] for rank in ranks) == [0, 1, 2]
        assert [rank["score"] for rank in ranks] == sorted((rank["score"] for rank in ranks), reverse=True)
        assert set(ranks[0]) == {"index", "score"}
        full = (await server.post(path, {**body, "return_text": True, "raw_scores": True})).json()
        assert [rank["text"] for rank in full] == [body["texts"][rank["index"]] for rank in full]
        assert full[-1]["score"] < 0
        wrong = await server.post(path, {"query": "cat", "texts": ["a", "b" * 600]})
        assert wrong.json()["error"]["param"] == "texts[1]"


async def test_predictions_are_sorted_labels(tmp_path: Path) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, "classify", core=core, joins=True) as server:
        for path in ("/predict", "/"):
            single = (await server.post(path, {"inputs": "abc"})).json()
            assert {label["label"] for label in single} == set(LABELS)
            assert sum(label["score"] for label in single) == pytest.approx(1)
            assert single == sorted(single, key=lambda label: -label["score"])
            assert (await server.post(path, {"inputs": [["abc"]]})).json() == [single]
        pair = (await server.post("/predict", {"inputs": ["a", "b"]})).json()
        assert texts(core)[-1] == "<|im_start|>a<|im_end|>b<|im_end|>"
        assert (await server.post("/predict", {"inputs": [["a", "b"], ["c", "d"]]})).json()[0] == pair
        raw = (await server.post("/predict", {"inputs": "abc", "raw_scores": True})).json()
        assert raw[0]["score"] > 1
        triple, mixed, unlike = ["a", "b", "c"], [["a"], ["b", 5]], [["a"], ["b", "c"]]
        for bad, param in ((triple, "inputs"), (mixed, "inputs[1][1]"), (unlike, "inputs")):
            answer = await server.post("/predict", {"inputs": bad})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        long = await server.post("/predict", {"inputs": [["a"], ["b" * 600]]})
        assert long.json()["error"]["param"] == "inputs[1]"


async def test_info_describes_the_model(tmp_path: Path) -> None:
    async with pooling_server(tmp_path, "embed") as server:
        info = (await server.http.get("/info")).json()
        assert (info["model_id"], info["max_input_length"], info["max_client_batch_size"]) == ("fake", 512, 2048)
        assert "embedding" in info["model_type"]
        assert (await server.http.get("/info", params={"model": "none"})).status_code == 404
    async with pooling_server(tmp_path, "classify", "score") as server:
        kind = (await server.http.get("/info")).json()["model_type"]
        assert kind["reranker"]["id2label"]["0"] == LABELS[0]
    async with pooling_server(tmp_path, "classify", facts={"score_method": None}) as server:
        assert "classifier" in (await server.http.get("/info")).json()["model_type"]
