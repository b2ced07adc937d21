"""Inputs beyond the context length: chunks, truncation, padding, and the limits of --pooler-config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.client.protocol import AddRequest
from tests.support.fake_core import FakeCore
from tests.support.pooling import pooled
from tests.support.pooling_server import added, pooling_server, vectors
from tests.support.tokenizer import write_tokenizer

PATH = "/v1/embeddings"
LIMIT = 64
IDS = [7 + i % 40 for i in range(150)]  # chunks of 64, 64 and 22 tokens


def embedding(core: FakeCore, ids: list[int], message: AddRequest) -> Any:
    """What the fake core answers for a prompt of its own."""
    return pooled(core.pools, AddRequest("x", np.array(ids, np.int32), message.params))


@pytest.mark.parametrize("path", [PATH, "/pooling", "/embed", "/v2/embed"])
async def test_long_inputs_are_embedded_in_chunks(path: str, tmp_path: Path) -> None:
    """The mean of their embeddings weighs tokens, and has length 1 again."""
    core = FakeCore()
    text = "".join(chr(97 + i % 23) for i in range(150))
    async with pooling_server(tmp_path, core=core, facts={"chunked": True}, max_model_len=LIMIT) as server:
        body: dict[str, Any] = {"input": text} if path in (PATH, "/pooling") else {"inputs": text}
        if path == "/v2/embed":
            body = {"texts": [text], "truncate": "NONE"}
        if path == "/pooling":
            body["task"] = "embed"
        answer = await server.post(path, body)
        assert answer.status_code == 200, answer.text
        values = answer.json()
    chunks = added(core)
    assert [len(chunk.prompt) for chunk in chunks] == [64, 64, len(np.concatenate([c.prompt for c in chunks])) - 128]
    arrays = [embedding(core, chunk.prompt.tolist(), chunk) for chunk in chunks]
    mean = sum(array * len(chunk.prompt) for array, chunk in zip(arrays, chunks, strict=True))
    got = values[0] if path == "/embed" else values["embeddings"]["float"][0] if path == "/v2/embed" else None
    got = values["data"][0]["embedding" if path == PATH else "data"] if got is None else got
    assert np.allclose(got, mean / np.linalg.norm(mean), atol=1e-6)


async def test_the_mean_of_chunks_is_not_normalized_if_they_are_not(tmp_path: Path) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, core=core, facts={"chunked": True}, max_model_len=LIMIT) as server:
        answer = await server.post(PATH, {"input": [IDS, IDS[:9]], "use_activation": False})
        body = answer.json()
    chunks = added(core)
    assert [len(chunk.prompt) for chunk in chunks] == [64, 64, 22, 9]
    arrays = [embedding(core, chunk.prompt.tolist(), chunk) for chunk in chunks]
    assert np.allclose(vectors(body)[0], (64 * arrays[0] + 64 * arrays[1] + 22 * arrays[2]) / 150, atol=1e-6)
    assert np.allclose(vectors(body)[1], arrays[3])
    assert body["usage"]["prompt_tokens"] == 159


async def test_the_longest_input_is_that_of_the_settings(tmp_path: Path) -> None:
    facts = {"chunked": True, "max_embed_len": 100}
    async with pooling_server(tmp_path, facts=facts, max_model_len=LIMIT) as server:
        assert (await server.post(PATH, {"input": IDS[:100]})).status_code == 200
        refused = await server.post(PATH, {"input": [IDS[:9], IDS]})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "input[1]"
        assert "100 tokens" in refused.json()["error"]["message"]
        cut = await server.post(PATH, {"input": IDS, "truncate_prompt_tokens": -1})
        assert cut.json()["usage"]["prompt_tokens"] == 100
        other = await server.post("/classify", {"input": IDS[:100]})  # no embedding
        assert other.status_code == 400
    async with pooling_server(tmp_path, facts={"max_embed_len": 20}, max_model_len=LIMIT) as server:
        assert (await server.post(PATH, {"input": IDS[:20]})).status_code == 200
        assert (await server.post(PATH, {"input": IDS[:21]})).status_code == 400


async def test_an_input_of_chunks_that_is_refused_is_named(tmp_path: Path) -> None:
    async with pooling_server(tmp_path, facts={"chunked": True}, max_model_len=LIMIT) as server:
        refused = await server.post(PATH, {"input": [IDS, IDS[:5], [*IDS, 1 << 30]]})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "input[2]"


async def test_chunks_count_as_results(tmp_path: Path) -> None:
    """Each of them has an array of its own until their mean is computed."""
    async with pooling_server(
        tmp_path, facts={"chunked": True, "embedding_size": 1 << 16}, max_model_len=LIMIT
    ) as server:
        refused = await server.post(PATH, {"input": IDS * 120})
        assert refused.status_code == 400
        assert "values" in refused.json()["error"]["message"]


PADDED = {"padding": "max_length"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"input": ["hello", "a"]}),
        ("/pooling", {"input": ["hello", "a"], "task": "token_embed"}),
        ("/classify", {"input": ["hello", "a"]}),
        ("/score", {"text_1": "hello", "text_2": ["a", "b"]}),
        ("/rerank", {"query": "hello", "documents": ["a", "b"]}),
    ],
)
async def test_padding(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, core=core, joins=True, max_model_len=LIMIT) as server:
        answer = await server.post(path, {**body, **PADDED})
        assert answer.status_code == 200, answer.text
        plain = await server.post(path, {**body, "padding": "do_not_pad"})
        assert plain.status_code == 200
    messages = added(core)
    padded, others = messages[:2], messages[2:]
    assert [len(message.prompt) for message in padded] == [LIMIT, LIMIT]
    for message, other in zip(padded, others, strict=True):
        length = len(other.prompt)
        assert message.prompt[:length].tolist() == other.prompt.tolist()
        assert len(set(message.prompt[length:].tolist())) == 1
        assert message.second_text_end == (None if message.second_text_start is None else length)


async def test_padding_behind_what_is_cut(tmp_path: Path) -> None:
    core = FakeCore()
    fields = {"truncate_prompt_tokens": 4, "truncation_side": "left", **PADDED}
    async with pooling_server(tmp_path, core=core, max_model_len=LIMIT) as server:
        await server.post(PATH, {"input": IDS, **fields})
    (message,) = added(core)
    assert message.prompt[:4].tolist() == IDS[-4:]
    assert len(message.prompt) == LIMIT


async def test_padding_is_bounded(tmp_path: Path) -> None:
    async with pooling_server(tmp_path, max_model_len=1 << 16) as server:
        refused = await server.post(PATH, {"input": [[7]] * 65, **PADDED})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "padding"
    assert "at most 4194304" in refused.json()["error"]["message"]


async def test_padding_needs_a_token(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        write_tokenizer(folder)
        (folder / "tokenizer_config.json").write_text("{}")

    async with pooling_server(tmp_path, write=write) as server:
        refused = await server.post(PATH, {"input": "x", **PADDED})
        wrong = await server.post(PATH, {"input": "x", "padding": "longest"})
    assert refused.json()["error"]["param"] == "padding"
    assert "no padding token" in refused.json()["error"]["message"]
    assert wrong.json()["error"]["param"] == "padding"


@pytest.mark.parametrize("name", ["normalize", "activation", "softmax"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"input": "x"}),
        (PATH, {"messages": [{"role": "user", "content": "x"}]}),
        ("/pooling", {"input": "x"}),
        ("/classify", {"input": "x"}),
        ("/score", {"text_1": "x", "text_2": "y"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ],
)
async def test_names_that_vllm_removed(path: str, body: dict[str, Any], name: str, tmp_path: Path) -> None:
    async with pooling_server(tmp_path) as server:
        refused = await server.post(path, {**body, name: True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == name
    assert "use `use_activation`" in refused.json()["error"]["message"]


LONG = "x" * 100


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": LONG, "text_2": ["a", "b"]}, "text_1"),
        ("/score", {"text_1": ["a", LONG], "text_2": ["a", "b"]}, "text_1[1]"),
        ("/score", {"queries": ["a"], "documents": ["a", LONG]}, "documents[1]"),
        ("/score", {"queries": [LONG], "items": ["a", "b"]}, "queries[0]"),
        ("/score", {"data_1": "x" * 30, "data_2": "x" * 30}, "data_2"),
        ("/rerank", {"query": LONG, "documents": ["a", "b"]}, "query"),
        ("/rerank", {"query": LONG, "texts": ["a", "b"]}, "query"),
        ("/rerank", {"query": "a", "texts": ["a", "b", "c", LONG]}, "texts[3]"),
        ("/predict", {"inputs": [["a", "b"], [LONG, "c"]]}, "inputs[1]"),
        ("/predict", {"inputs": ["a", 3]}, "inputs[1]"),
        ("/predict", {"inputs": [["a"], ["b", 3]]}, "inputs[1][1]"),
        ("/score", {"text_1": "y" * (3 << 20), "text_2": ["a", "b"]}, "text_1"),
        (PATH, {"messages": [{"role": "user", "content": "y" * (3 << 20)}]}, "messages"),
    ],
)
async def test_errors_name_the_field_that_was_sent(path: str, body: dict[str, Any], param: str, tmp_path: Path) -> None:
    """Of a pair that is too long the query, if no document would fit."""
    async with pooling_server(tmp_path, joins=True, max_model_len=40) as server:
        refused = await server.post(path, body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param, refused.text
