"""/v2/embed."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_core import FakeCore
from tests.support.pooling_server import pooling_server, texts

PATH = "/v2/embed"


async def test_several_types_at_once(tmp_path: Path) -> None:
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    async with pooling_server(tmp_path) as server:
        body = {"texts": ["hello", "world"], "embedding_types": kinds, "input_type": "search_document"}
        answer = (await server.post(PATH, body)).json()
        plain = (await server.post(PATH, {"texts": ["hello", "world"]})).json()
        wrapped = {"inputs": [{"content": [{"type": "text", "text": text}]} for text in ("hello", "world")]}
        same = (await server.post(PATH, wrapped)).json()
    assert answer["response_type"] == "embeddings_by_type"
    assert answer["texts"] == ["hello", "world"]
    assert answer["meta"]["billed_units"] == {"input_tokens": 10, "image_tokens": 0}
    embeddings = answer["embeddings"]
    assert list(embeddings) == kinds
    assert plain["embeddings"] == same["embeddings"] == {"float": embeddings["float"]}
    floats = np.array(embeddings["float"], np.float32)
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in embeddings["base64"]]
    assert np.array_equal(decoded, floats)
    assert np.array_equal(np.array(embeddings["uint8"]) - 128, embeddings["int8"])
    assert np.array_equal(np.array(embeddings["ubinary"]) - 128, embeddings["binary"])
    assert np.array_equal(np.unpackbits(np.array(embeddings["ubinary"], np.uint8), axis=1), floats > 0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "abcdef"),
        ({"truncate": "START"}, "cdefgh"),
        ({"max_tokens": 2}, "ab"),
        ({"max_tokens": 2, "truncate": "NONE"}, "ab"),
        ({"truncate": "NONE"}, None),
    ],
)
async def test_long_texts_are_cut(tmp_path: Path, fields: dict[str, Any], expected: str | None) -> None:
    core = FakeCore()
    async with pooling_server(tmp_path, core=core, max_model_len=6) as server:
        answer = await server.post(PATH, {"texts": ["abcdefgh"], **fields})
    if expected is None:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "texts[0]")
    else:
        assert answer.status_code == 200
        assert texts(core) == [expected]


async def test_types_of_input_choose_prompts(tmp_path: Path) -> None:
    core = FakeCore()
    files = {"config_sentence_transformers.json": {"prompts": {"query": "q: ", "passage": "p: "}}}
    async with pooling_server(tmp_path, core=core, files=files) as server:
        for kind in ("search_query", "search_document", "clustering", None):
            assert (await server.post(PATH, {"texts": ["x"], "input_type": kind})).status_code == 200
    assert texts(core) == ["q: x", "p: x", "x", "x"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a"], "inputs": ["b"]}, "texts"),
        ({"texts": ["a", 1]}, "texts[1]"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "inputs[0].content[0]"),
        ({"texts": ["a"], "images": ["x"]}, "images"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types[0]"),
        ({"texts": ["a"], "embedding_types": []}, "embedding_types"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["a"], "max_tokens": 1000}, "max_tokens"),
        ({"texts": ["a"], "output_dimension": 1000}, "output_dimension"),
        ({"texts": ["a"] * 2049}, "texts"),
    ],
)
async def test_what_is_wrong_is_named(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with pooling_server(tmp_path) as server:
        answer = await server.post(PATH, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
