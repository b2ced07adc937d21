"""POST /v1/completions, as vLLM and OpenAI have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.api.completions import prepare
from quire.engine.client.protocol import AddRequest
from quire.engine.client.token_mask import token_ids
from quire.protocol.completions import Completion
from tests.support.fake_core import FakeCore, prompt_of, says
from tests.support.server import chunks_of, running_server
from tests.support.tokenizer import VOCAB_SIZE

PATH = "/v1/completions"


async def test_a_text_is_continued(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(PATH, {"model": "fake", "prompt": "hello", "max_tokens": 20})
        assert answer.status_code == 200
        body = answer.json()
        Completion.model_validate(body, strict=True)
        assert body["object"] == "text_completion"
        assert body["model"] == "fake"
        assert body["id"] == f"cmpl-{answer.headers['x-request-id']}"
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("HELLO", "stop", None)
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 6, 11)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["AB"]),
        (prompt_of("ab").tolist(), ["AB"]),
        (["ab", "cd"], ["AB", "CD"]),
        ([prompt_of("ab").tolist(), prompt_of("cd").tolist()], ["AB", "CD"]),
    ],
)
async def test_all_kinds_of_prompts(tmp_path: Path, prompt: Any, texts: list[str]) -> None:
    async with running_server(tmp_path) as server:
        body = (await server.post(PATH, {"prompt": prompt, "max_tokens": 20})).json()
        assert [choice["text"] for choice in body["choices"]] == texts
        assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
        assert body["usage"]["prompt_tokens"] == 2 * len(texts)


async def test_n_answers_to_each_prompt(tmp_path: Path) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        body = (await server.post(PATH, {"prompt": ["ab", "cd"], "n": 3, "seed": 5, "max_tokens": 9})).json()
        assert [choice["text"] for choice in body["choices"]] == ["AB"] * 3 + ["CD"] * 3
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (4, 18)
    seeds = sorted(message.sampling_params.seed or 0 for message in core.received if isinstance(message, AddRequest))
    assert seeds == [5, 5, 6, 6, 7, 7]


async def test_the_default_is_sixteen_tokens(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("x" * 50))) as server:
        choice = (await server.post(PATH, {"prompt": "a"})).json()["choices"][0]
        assert (len(choice["text"]), choice["finish_reason"]) == (16, "length")


async def test_a_stream_adds_up_to_the_whole(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(PATH, {"prompt": ["hello", "you"], "stream": True, "max_tokens": 20})
        assert answer.headers["content-type"].startswith("text/event-stream")
        chunks = chunks_of(answer.text)
        texts = ["", ""]
        for chunk in chunks:
            assert chunk["object"] == "text_completion"
            assert chunk["usage"] is None
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == ["HELLO", "YOU"]
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert ends.count("stop") == 2


async def test_usage_ends_a_stream_if_wanted(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await server.post(PATH, {"prompt": "hello", "stream": True, "stream_options": options})
        *chunks, last = chunks_of(answer.text)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 6
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 6


async def test_echo_puts_the_prompt_in_front(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for prompt in ("hello ", prompt_of("hello ").tolist()):
            body = {"prompt": prompt, "echo": True, "max_tokens": 20}
            assert (await server.post(PATH, body)).json()["choices"][0]["text"] == "hello HELLO "
            streamed = chunks_of((await server.post(PATH, {**body, "stream": True})).text)
            assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "hello HELLO "


async def test_echo_alone_gives_the_prompt_and_its_logprobs(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = (await server.post(PATH, {"prompt": "hello", "echo": True, "max_tokens": 0, "logprobs": 1})).json()
        (choice,) = body["choices"]
        assert choice["text"] == "hello"
        assert choice["logprobs"]["tokens"] == list("hello")
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
        assert body["usage"]["completion_tokens"] == 0


async def test_logprobs_are_columns(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = {"prompt": "hi", "max_tokens": 2, "logprobs": 2, "echo": True}
        columns = (await server.post(PATH, body)).json()["choices"][0]["logprobs"]
        assert columns["tokens"] == ["h", "i", "H", "I"]
        assert columns["text_offset"] == [0, 1, 2, 3]
        assert columns["token_logprobs"] == [None, -0.5, -0.5, -0.5]
        assert columns["top_logprobs"][0] is None
        assert columns["top_logprobs"][2] == {"H": -0.5, "I": -1.5}
        streamed = chunks_of((await server.post(PATH, {**body, "stream": True})).text)
        merged = {
            key: [value for chunk in streamed for value in chunk["choices"][0]["logprobs"][key]] for key in columns
        }
        assert merged == columns


async def test_offsets_count_characters_not_their_pieces(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = {"prompt": "w\u00f6rld", "max_tokens": 2, "logprobs": 1, "echo": True}
        columns = (await server.post(PATH, body)).json()["choices"][0]["logprobs"]
        assert columns["text_offset"] == [0, 1, 1, 2, 3, 4, 5, 6]
        streamed = chunks_of((await server.post(PATH, {**body, "stream": True})).text)
        offsets = [offset for chunk in streamed for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == columns["text_offset"]


async def test_tokens_as_ids(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = {"prompt": "hi", "max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True}
        body["return_token_ids"] = True
        (choice,) = (await server.post(PATH, body)).json()["choices"]
        ids = prompt_of("HI").tolist()
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
        assert choice["token_ids"] == ids
        assert choice["prompt_token_ids"] == prompt_of("hi").tolist()
        first, *others = chunks_of((await server.post(PATH, {**body, "stream": True})).text)
        assert first["choices"][0]["prompt_token_ids"] == prompt_of("hi").tolist()
        assert [token for chunk in (first, *others) for token in chunk["choices"][0]["token_ids"]] == ids


async def test_the_number_of_prompt_logprobs_has_a_limit(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        prompts = [[5] * 90] * 5
        for fields in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}):
            body = {"prompt": prompts, "max_tokens": 1, **fields}
            assert (await server.post(PATH, body)).status_code == 200
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepare, "MAX_PROMPT_LOGPROBS", 21 * 90 * 4)
            for fields in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}):
                answer = await server.post(PATH, {"prompt": prompts, "max_tokens": 1, **fields})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_logprobs_of_the_whole_vocabulary(tmp_path: Path) -> None:
    async with running_server(tmp_path, max_logprobs=-1) as server:
        for count in (-1, 1 << 60):
            body = {"prompt": "hi", "max_tokens": 1, "logprobs": count, "prompt_logprobs": count}
            answer = await server.post(PATH, {**body, "return_tokens_as_token_ids": True})
            (choice,) = answer.json()["choices"]
            assert len(choice["logprobs"]["top_logprobs"][0]) > 250
            assert len(choice["prompt_logprobs"][1]) > 250
        assert (await server.post(PATH, {"prompt": "hi", "logprobs": -2})).status_code == 400


async def test_prompt_logprobs(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        (choice,) = (await server.post(PATH, {"prompt": "hi", "max_tokens": 1, "prompt_logprobs": 1})).json()["choices"]
        token = str(prompt_of("i")[0])
        assert choice["prompt_logprobs"] == [None, {token: {"logprob": -0.5, "rank": 1, "decoded_token": "i"}}]
        assert choice["logprobs"] is None


async def test_cached_tokens_are_counted_once_for_each_prompt(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = (await server.post(PATH, {"prompt": ["a" * 20, "b" * 40], "n": 2, "max_tokens": 1})).json()
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 16 + 32}


async def test_a_long_prompt_is_cut_if_wanted(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "max_tokens": 9}
        answer = (await server.post(PATH, body)).json()
        assert answer["choices"][0]["text"] == "EF"
        assert answer["usage"]["prompt_tokens"] == 2
        for side, text in (("right", "AB"), ("left", "EF")):
            answer = (await server.post(PATH, {**body, "truncation_side": side})).json()
            assert answer["choices"][0]["text"] == text
        refused = await server.post(PATH, {**body, "truncation_side": "middle"})
        assert refused.json()["error"]["param"] == "truncation_side"
        body = {"prompt": "x" * 3000, "truncate_prompt_tokens": -1, "max_tokens": 1}
        assert (await server.post(PATH, body)).json()["usage"]["prompt_tokens"] == 511
        body = {"prompt": "x" * 3000, "truncate_prompt_tokens": -1, "max_tokens": 12}
        assert (await server.post(PATH, body)).json()["usage"]["prompt_tokens"] == 500


@pytest.mark.parametrize(
    ("fields", "numbers", "advice"),
    [
        ({"prompt": "x" * 600, "max_tokens": 4}, (512, 600, 4), "Please reduce the length of the input."),
        ({"prompt": "x" * 600, "max_tokens": None}, (512, 600), "Please reduce the length of the input."),
        ({"prompt": "xy", "max_tokens": 9999}, (512, 2, 9999), "Please request fewer output tokens."),
        (
            {"prompt": "x" * 500, "max_tokens": 100},
            (512, 500, 100),
            "Please reduce the length of the input, or request fewer output tokens.",
        ),
    ],
)
async def test_too_many_tokens_are_refused_with_numbers_and_what_helps(
    tmp_path: Path, fields: dict[str, Any], numbers: tuple[int, ...], advice: str
) -> None:
    async with running_server(tmp_path) as server:
        error = (await server.post(PATH, fields)).json()["error"]
        assert all(str(number) in error["message"] for number in numbers), error
        assert error["message"].endswith(advice)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x" * 600}, "input_tokens"),
        ({"prompt": "x" * 100_000}, "input_text"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"prompt": "x" * 500, "max_tokens": 100}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"min_tokens": 30}, "min_tokens"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x"] * 200}, "bad_words"),
        ({"priority": 1}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"suffix": "end"}, "suffix"),
        ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"use_beam_search": True, "stop": "a"}, "stop"),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"use_beam_search": True, "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"use_beam_search": True, "min_tokens": 1}, "min_tokens"),
        ({"use_beam_search": True, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True, "echo": True, "logprobs": 1}, "echo"),
        ({"use_beam_search": True, "guided_choice": ["a"]}, "use_beam_search"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
        ({"length_penalty": 0.5}, "length_penalty"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], param: str | None
) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        answer = await server.post(PATH, {"prompt": "hi", **fields})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["code"] == 400
        assert error["type"] == "BadRequestError"
        assert error["message"]
        if param is not None:
            assert error["param"].split(".")[0].split("[")[0] == param
        assert not any(isinstance(message, AddRequest) for message in core.received)


async def test_not_a_number_is_refused(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        headers = {"content-type": "application/json"}
        for value in ("NaN", "Infinity", "-Infinity"):
            body = f'{{"prompt": "x", "temperature": {value}}}'
            assert (await server.http.post(PATH, content=body, headers=headers)).status_code == 400


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": "\\ud800"}']
)
async def test_bodies_that_are_no_requests_are_refused(tmp_path: Path, body: bytes) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.http.post(PATH, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == 400


async def test_unknown_models_are_not_found(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(PATH, {"model": "other", "prompt": "x"})
        assert answer.status_code == 404
        assert answer.json()["error"] == {
            "message": "The model `other` does not exist.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }


async def test_models_are_chosen_by_name(tmp_path: Path) -> None:
    cores = (FakeCore(answer=says("zero")), FakeCore(answer=says("one")))
    async with running_server(tmp_path, *cores) as server:
        for name, text in (("fake", "zero"), ("alias", "zero"), ("fake-1", "one"), (None, "zero")):
            body = (await server.post(PATH, {"model": name, "prompt": "x"})).json()
            assert body["choices"][0]["text"] == text
            assert body["model"] == ("fake" if text == "zero" else "fake-1")


async def test_sampling_fields_reach_the_engine(tmp_path: Path) -> None:
    core = FakeCore()
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": -5,
        "stop_token_ids": [9],
        "min_tokens": 2,
        "max_tokens": 12,
    }
    async with running_server(tmp_path, core, scheduling_policy="priority") as server:
        extra = {"logit_bias": {"3": 1000}, "bad_words": ["no"], "ignore_eos": True, "priority": -4, "cache_salt": "s"}
        answer = await server.post(PATH, {"prompt": "hi", "allowed_token_ids": [1, 2], **fields, **extra})
        assert answer.status_code == 200, answer.text
    (message,) = [message for message in core.received if isinstance(message, AddRequest)]
    for name, value in fields.items():
        got = getattr(message.sampling_params, name)
        assert (list(got) if isinstance(value, list) else got) == value
    assert message.sampling_params.allowed_tokens is not None
    assert token_ids(message.sampling_params.allowed_tokens) == [1, 2]
    assert message.sampling_params.logit_bias == {3: 100.0}
    assert message.sampling_params.bad_words == (tuple(prompt_of("no").tolist()), tuple(prompt_of(" no").tolist()))
    assert message.sampling_params.eos_token_ids == ()
    assert (message.priority, message.cache_salt) == (-4, "s")


async def test_defaults_come_from_the_models_own_file(tmp_path: Path) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [5, 6], "max_new_tokens": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    for mode, expected in (("auto", (0.6, 0.95, 20)), ("none", (1.0, 1.0, 0))):
        core = FakeCore()
        async with running_server(tmp_path, core, generation_config=mode) as server:
            await server.post(PATH, {"prompt": "hi", "top_k": None})
        (message,) = [message for message in core.received if isinstance(message, AddRequest)]
        assert (
            message.sampling_params.temperature,
            message.sampling_params.top_p,
            message.sampling_params.top_k,
        ) == expected
        assert set(message.sampling_params.eos_token_ids) >= {5, 6}
