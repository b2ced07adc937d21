"""/v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_core import INFO, FakeCore
from tests.support.pooling import pooling_info
from tests.support.pooling_server import pooling_server
from tests.support.server import running_server


async def test_the_models_page(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(), FakeCore()) as server:
        cards = (await server.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["fake", "alias", "fake-1"]
        assert {card["root"] for card in cards} == {"root-0", "root-1"}
        assert all(card["max_model_len"] == 512 and card["object"] == "model" for card in cards)
        assert (await server.http.get("/v1/models/alias")).json() == cards[1]
        answer = await server.http.get("/v1/models/some/other")
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
        answer = await server.http.get("/v1/models/")
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, "The path lacks the name of a model.")


async def test_the_models_page_tells_tasks(tmp_path: Path) -> None:
    async with pooling_server(tmp_path, "embed", facts={"score_method": "cosine"}) as server:
        (card, _) = (await server.http.get("/v1/models")).json()["data"]
        assert card["tasks"] == ["embed", "score"]
    async with running_server(tmp_path) as server:
        assert (await server.http.get("/v1/models/fake")).json()["tasks"] == ["generate"]


CHAT = {"messages": [{"role": "user", "content": "x"}]}
GENERATING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/completions/render", {"prompt": "x"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions/render", CHAT),
    ("/v1/responses", {"input": "x"}),
    ("/v1/responses/render", {"input": "x"}),
    ("/v1/messages", {**CHAT, "max_tokens": 1}),
    ("/v1/messages/render", {**CHAT, "max_tokens": 1}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
    ("/invocations", {"prompt": "x"}),
]
POOLING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": "x"}),
    ("/v1/embeddings", CHAT),
    ("/v2/embed", {"texts": ["x"]}),
    ("/embed", {"inputs": "x"}),
    ("/embed_all", {"inputs": "x"}),
    ("/embed_sparse", {"inputs": "x"}),
    ("/classify", {"input": "x"}),
    ("/predict", {"inputs": "x"}),
    ("/pooling", {"input": "x"}),
    ("/score", {"text_1": "x", "text_2": "y"}),
    ("/rerank", {"query": "x", "documents": ["y"]}),
    ("/rerank", {"query": "x", "texts": ["y"]}),
    ("/invocations", {"input": "x"}),
]


async def test_what_a_model_cannot_do_is_a_400_with_what_it_can(tmp_path: Path) -> None:
    async with pooling_server(tmp_path, "embed", facts={"score_method": None}) as server:
        for path, body in GENERATING:
            for named in ({}, {"model": "alias"}):
                answer = await server.post(path, {**body, **named})
                assert answer.status_code == 400, path
                assert "supports: embed." in answer.json()["error"]["message"]
        for path, body in POOLING:
            if path not in ("/score", "/rerank", "/classify", "/predict"):
                continue
            answer = await server.post(path, body)
            assert "supports: embed." in answer.json()["error"]["message"]
    async with running_server(tmp_path) as server:
        for path, body in POOLING:
            answer = await server.post(path, body)
            assert answer.status_code == 400, path
            assert "supports: generate." in answer.json()["error"]["message"]
        assert (await server.http.get("/info")).status_code == 400


async def test_a_request_without_a_name_finds_a_model_with_the_task(tmp_path: Path) -> None:
    """Clients of TEI cannot name one."""
    embedder = FakeCore(info=pooling_info(INFO, "embed"))
    async with running_server(tmp_path, FakeCore(), embedder) as server:
        assert (await server.post("/v1/embeddings", {"input": "x"})).json()["model"] == "fake-1"
        assert (await server.post("/embed", {"inputs": "x"})).status_code == 200
        assert (await server.post("/invocations", {"inputs": "x"})).status_code == 200
        assert (await server.post("/v1/completions", {"prompt": "x"})).json()["model"] == "fake"
        assert (await server.post("/pooling", {"input": "x"})).json()["model"] == "fake-1"
        assert (await server.post("/v1/embeddings", {"input": "x", "model": "fake"})).status_code == 400
        assert (await server.post("/v1/embeddings", {"input": "x", "model": "none"})).status_code == 404


async def test_tokenize_and_back(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = (await server.post("/tokenize", {"prompt": "a\u20ac", "return_token_strs": True})).json()
        assert (body["count"], body["max_model_len"], len(body["tokens"])) == (4, 512, 4)
        assert body["token_strs"] == ["a", "\u00e2", "\u0124", "\u00ac"]  # byte-level letters, which keep all bytes
        assert (await server.post("/detokenize", {"tokens": body["tokens"]})).json() == {"prompt": "a\u20ac"}
        chat = (await server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json()
        text = (await server.post("/detokenize", {"tokens": chat["tokens"]})).json()["prompt"]
        assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
        assert chat["token_strs"] is None


async def test_the_tokenizers_configuration_is_served_if_wanted(tmp_path: Path) -> None:
    async with running_server(tmp_path, enable_tokenizer_info_endpoint=True) as server:
        body = (await server.http.get("/tokenizer_info")).json()
        assert (body["eos_token"], body["tokenizer_class"]) == ("<|im_end|>", "PreTrainedTokenizerFast")
        assert "<|im_start|>" in body["chat_template"]
        assert (await server.http.get("/tokenizer_info", params={"model": "none"})).status_code == 404
    async with running_server(tmp_path) as server:
        assert (await server.http.get("/tokenizer_info")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [1 << 40]}),
        ("/detokenize", {"tokens": [5000]}),
        ("/detokenize", {}),
    ],
)
async def test_what_cannot_be_tokenized_is_refused(tmp_path: Path, path: str, body: dict[str, object]) -> None:
    async with running_server(tmp_path) as server:
        assert (await server.post(path, body)).status_code == 400
