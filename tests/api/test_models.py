"""/v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_core import FakeCore
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
