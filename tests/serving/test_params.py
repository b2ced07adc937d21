"""Sampling parameters out of bounds are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.client.protocol import AddRequest
from quire.rendering.renderer import Renderer
from quire.rendering.tokenizer import Tokenizer
from tests.support.fake_core import FakeCore, prompt_of, says
from tests.support.server import chunks_of, running_server
from tests.support.tokenizer import EOS, VOCAB_SIZE

PATH = COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
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
        assert param is None or answer.json()["error"]["param"].split(".")[0].split("[")[0] == param
    assert not any(isinstance(message, AddRequest) for message in core.received)


async def test_a_choice_that_is_left_is_enough(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for fields in (
            {"allowed_token_ids": [A, B], "bad_words": ["a"]},
            {"allowed_token_ids": [EOS], "min_tokens": 1, "ignore_eos": True},
            {"temperature": 1000, "repetition_penalty": 1000},
        ):
            assert (await server.post(PATH, {"prompt": "hi", **fields})).status_code == 200


async def test_sampling_fields_are_checked_before_anything_is_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_server(tmp_path) as server:
        monkeypatch.setattr(Renderer, "chat", None)
        monkeypatch.setattr(Renderer, "text", None)
        for fields, param in (
            ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
            ({"allowed_token_ids": []}, "allowed_token_ids"),
            ({"stop": [""]}, "stop"),
            ({"use_beam_search": True, "min_tokens": 1}, "min_tokens"),
        ):
            for path, body in ((PATH, {"prompt": "hi"}), (CHATS, {"messages": [{"role": "user", "content": "hi"}]})):
                answer = await server.post(path, {**body, **fields})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


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
    seeds = {message.sampling_params.seed for message in core.received if isinstance(message, AddRequest)}
    assert seeds == {(1 << 63) - 1, -(1 << 63)}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATH, {"stop_token_ids": [A] * 1025}, "stop_token_ids"),
        (PATH, {"stop": "x" * 1025}, "stop"),
        (PATH, {"stop": ["x", "x" * 1025]}, "stop[1]"),
        ("/v1/messages", {"stop_sequences": ["x" * 1025]}, "stop_sequences[0]"),
    ],
)
async def test_what_each_token_is_compared_with_is_bounded(
    tmp_path: Path, path: str, fields: dict[str, Any], param: str
) -> None:
    async with running_server(tmp_path) as server:
        common = {"messages": [{"role": "user", "content": "x"}]} if path == "/v1/messages" else {"prompt": "x"}
        answer = await server.post(path, {**common, "max_tokens": 1, **fields})
        assert answer.status_code == 400, answer.text
        if path == PATH:
            assert answer.json()["error"]["param"] == param
        else:
            assert param in answer.json()["error"]["message"]


async def test_parameters_are_made_once_for_all_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        encoded.append(text)
        return encode(self, text, add_special_tokens=add_special_tokens)

    async with running_server(tmp_path) as server:
        monkeypatch.setattr(Tokenizer, "encode", counted)
        body = {"prompt": [[A]] * 50, "bad_words": ["no"], "max_tokens": None, "min_tokens": 1}
        assert (await server.post(PATH, body)).status_code == 200
    assert encoded == ["no", " no"]


async def test_each_prompt_has_its_own_room_for_min_tokens(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = {"prompt": [[A], [A] * 400], "max_tokens": None, "min_tokens": 200}
        answer = await server.post(PATH, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")


async def test_more_sequences_than_ever_fit_are_refused_before_they_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_server(tmp_path, capacity=3) as server:
        monkeypatch.setattr(Tokenizer, "encode", None)
        for path in (PATH, f"{PATH}/render"):
            answer = await server.post(path, {"prompt": ["x"] * 4, "bad_words": ["y"], "stop_token_ids": [A]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
            assert "4 sequences" in answer.json()["error"]["message"]


async def test_log_probabilities_of_listed_tokens(tmp_path: Path) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    asked = {"logprob_token_ids": [104, 105]}
    async with running_server(tmp_path, FakeCore(answer=says("abc"))) as server:
        answer = (await server.post(CHATS, {**chat, **asked, "logprobs": True})).json()
        for entry in answer["choices"][0]["logprobs"]["content"]:
            assert [logprob["logprob"] for logprob in entry["top_logprobs"]] == [-1.5, -2.5]
        streamed = await server.post(CHATS, {**chat, **asked, "logprobs": True, "stream": True})
        entries = [
            entry
            for chunk in chunks_of(streamed.text)
            if chunk["choices"][0]["logprobs"]
            for entry in chunk["choices"][0]["logprobs"]["content"]
        ]
        assert entries == answer["choices"][0]["logprobs"]["content"]
        completion = {"prompt": "hi", "max_tokens": 2, "logprobs": 0, "return_tokens_as_token_ids": True, **asked}
        tops = (await server.post(COMPLETIONS, completion)).json()["choices"][0]["logprobs"]["top_logprobs"]
        assert all({"token_id:104": -1.5, "token_id:105": -2.5}.items() <= top.items() for top in tops)
        for path, body in (
            (CHATS, {**chat, **asked}),
            (CHATS, {**chat, "logprobs": True, "logprob_token_ids": [1 << 20]}),
            (CHATS, {**chat, "logprobs": True, "logprob_token_ids": list(range(129))}),
            (CHATS, {**chat, **asked, "logprobs": True, "use_beam_search": True}),
            (COMPLETIONS, {"prompt": "hi", **asked}),
            (COMPLETIONS, {**completion, "max_tokens": 0, "echo": True}),
        ):
            refused = await server.post(path, body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_token_ids"), body
