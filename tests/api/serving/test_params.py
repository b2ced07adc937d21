"""Sampling parameters out of bounds are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.wire.protocol import AddRequest
from quire.multimodal.tokenizer import Tokenizer
from tests.support.fake_core import FakeCore, prompt_of
from tests.support.server import running_server
from tests.support.tokenizer import EOS, VOCAB_SIZE

PATH = "/v1/completions"
A, B = prompt_of("ab").tolist()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty"),
        ({"temperature": 1e39}, "temperature"),
        ({"logit_bias": {str(token): 1 for token in range(2000)}}, "logit_bias"),
        ({"bad_words": ["x" * 10_000]}, "bad_words"),
        ({"allowed_token_ids": [A], "bad_words": ["a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [A, B, EOS], "bad_words": ["a"], "stop_token_ids": [B], "min_tokens": 1}, None),
        ({"stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 1}, None),
    ],
)
async def test_what_no_model_could_sample_with_is_refused(
    tmp_path: Path, fields: dict[str, Any], param: str | None
) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        answer = await server.post(PATH, {"prompt": "hi", **fields})
        assert answer.status_code == 400, answer.text
        assert param is None or answer.json()["error"]["param"].split(".")[0] == param
    assert not any(isinstance(message, AddRequest) for message in core.received)


async def test_a_choice_that_is_left_is_enough(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for fields in (
            {"allowed_token_ids": [A, B], "bad_words": ["a"]},
            {"allowed_token_ids": [EOS], "min_tokens": 1, "ignore_eos": True},
            {"temperature": 1000, "repetition_penalty": 1000},
        ):
            assert (await server.post(PATH, {"prompt": "hi", **fields})).status_code == 200


async def test_bad_words_that_the_model_cannot_write_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_server(tmp_path) as server:
        for tokens in ([], [VOCAB_SIZE]):
            monkeypatch.setattr(Tokenizer, "encode", lambda *_, tokens=tokens, **__: tokens)
            answer = await server.post(PATH, {"prompt": prompt_of("hi").tolist(), "bad_words": ["no"]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bad_words")


async def test_seeds_of_several_answers_stay_in_64_bits(tmp_path: Path) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        answer = await server.post(PATH, {"prompt": "hi", "n": 2, "seed": (1 << 63) - 1})
        assert answer.status_code == 200
    seeds = {message.params.seed for message in core.received if isinstance(message, AddRequest)}
    assert seeds == {(1 << 63) - 1, -(1 << 63)}
