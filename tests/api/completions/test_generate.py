"""Tokens in, tokens out; and prompts that are rendered but not answered."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.engine.client.protocol import AddRequest
from quire.engine.client.sampling_params import SamplingParams
from tests.support.fake_core import CONTEXT, FakeCore, says
from tests.support.server import chunks_of, running_server
from tests.support.tokenizer import EOS, byte_tokenizer

PATH = "/inference/v1/generate"
TOKENS = byte_tokenizer().encode("abc").ids
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
ANSWER = byte_tokenizer().encode("ABC").ids


def request(**params: Any) -> dict[str, Any]:
    return {"token_ids": TOKENS, "sampling_params": params}


async def test_tokens_go_in_and_come_out(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(PATH, {**request(logprobs=1), "request_id": "me"})
        body = answer.json()
        text = (await server.post(PATH, {**request(), "output_mode": "text"})).json()
    (choice,) = body["choices"]
    assert choice["token_ids"][: len(ANSWER)] == ANSWER
    assert (choice["text"], choice["finish_reason"]) == (None, "stop")
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert body["request_id"] == "generate-tokens-me"
    assert body["usage"]["prompt_tokens"] == len(TOKENS)
    assert text["choices"][0]["text"] == "ABC"


async def test_streams_add_up(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        whole = (await server.post(PATH, request(n=2))).json()
        answer = await server.post(PATH, {**request(n=2), "stream": True, "stream_options": {"include_usage": True}})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert chunks[-1]["usage"] == whole["usage"]
    for index in range(2):
        pieces = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [token for piece in pieces for token in piece["token_ids"]] == whole["choices"][index]["token_ids"]
        assert pieces[-1]["finish_reason"] == "stop"


async def test_sampling_is_what_is_said_and_nothing_else(tmp_path: Path) -> None:
    core = FakeCore()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 7, "max_new_tokens": 30}')
    async with running_server(tmp_path, core) as server:
        await server.post(PATH, request())
        await server.post(PATH, request(max_tokens=400, ignore_eos=True, stop_token_ids=[5]))
        await server.post(PATH, request(temperature=None, top_k=None))
    first, second, third = [message.sampling_params for message in core.received if isinstance(message, AddRequest)]
    assert (first.max_tokens, first.temperature, first.top_k) == (30, 1.0, 0)
    assert (third.temperature, third.top_k) == (1.0, 0)
    assert first.eos_token_ids == (EOS,)
    assert second.max_tokens == 400
    assert (second.eos_token_ids, second.stop_token_ids) == ((), frozenset({5}))


async def test_what_is_rendered_generates_the_same(tmp_path: Path) -> None:
    chat: Any = {**CHAT, "temperature": 0, "max_tokens": 30, "stop": ["Q"]}
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        whole = (await server.post("/v1/chat/completions", {**chat, "return_token_ids": True})).json()
        rendered = (await server.post("/v1/chat/completions/render", chat)).json()
        assert len([message for message in core.received if isinstance(message, AddRequest)]) == 1
        again = (await server.post(PATH, {name: value for name, value in rendered.items() if name != "prompt"})).json()
        listed = (await server.post("/v1/completions/render", {"prompt": ["ab", "cd"], "seed": 5})).json()
    assert rendered["token_ids"] == whole["prompt_token_ids"]
    assert "hello" in rendered["prompt"]
    assert again["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
    first, second = [message.sampling_params for message in core.received if isinstance(message, AddRequest)]
    assert first == second
    assert [entry["token_ids"] for entry in listed] == [byte_tokenizer().encode(text).ids for text in ("ab", "cd")]
    assert listed[0]["sampling_params"]["seed"] == 5


async def test_tokens_have_their_places_in_the_text(tmp_path: Path) -> None:
    wanted = {"return_token_offsets": True}
    async with running_server(tmp_path) as server:
        chat = (await server.post("/v1/chat/completions/render", {**CHAT, **wanted})).json()
        texts = (await server.post("/v1/completions/render", {"prompt": ["abc", "déf"], **wanted})).json()
        (tokens,) = (await server.post("/v1/completions/render", {"prompt": TOKENS, **wanted})).json()
        without = (await server.post("/v1/chat/completions/render", CHAT)).json()
        elsewhere = await server.post("/v1/chat/completions", {**CHAT, **wanted})
        again = await server.post(PATH, chat)
    for rendered in (chat, *texts):
        offsets = rendered["token_offsets"]
        assert len(offsets) == len(rendered["token_ids"])
        places = [place for place in offsets if place[0] < place[1]]
        assert places == sorted(places)
        assert places[-1][1] <= len(rendered["prompt"])
    assert [texts[0]["prompt"][start:end] for start, end in texts[0]["token_offsets"][-3:]] == ["a", "b", "c"]
    assert tokens["token_offsets"] is without["token_offsets"] is None
    assert elsewhere.status_code == 400
    assert "return_token_offsets" in elsewhere.json()["error"]["message"]
    assert again.status_code == 200


async def test_all_apis_render_the_same_conversation_alike(tmp_path: Path) -> None:
    """A router asks each API for the tokens of its requests."""
    bodies = {
        "/v1/chat/completions": {**CHAT, "max_tokens": 9},
        "/v1/responses": {"input": CHAT["messages"], "max_output_tokens": 9},
        "/v1/messages": {**CHAT, "max_tokens": 9},
    }
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        rendered = {path: (await server.post(f"{path}/render", body)).json() for path, body in bodies.items()}
        wrong = await server.post("/v1/messages/render", {"messages": []})
        assert not any(isinstance(message, AddRequest) for message in core.received)
        for path, body in bodies.items():
            assert (await server.post(path, body)).status_code == 200
    sent = [message.prompt.tolist() for message in core.received if isinstance(message, AddRequest)]
    assert [prompt["token_ids"] for prompt in rendered.values()] == sent
    assert sent[0] == sent[1] == sent[2]
    assert [prompt["sampling_params"]["max_tokens"] for prompt in rendered.values()] == [9, 9, 9]
    assert [prompt["request_id"].split("-")[0].split("_")[0] for prompt in rendered.values()] == [
        "chatcmpl",
        "resp",
        "msg",
    ]
    assert (wrong.status_code, wrong.json()["type"]) == (400, "error")


async def test_what_holds_an_answer_is_rendered_with_it(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    core = FakeCore(answer=says('{"n": 1}'))
    async with running_server(tmp_path, core, tool_call_parser="hermes") as server:
        for path, body in (
            ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}, "max_tokens": 9}),
            ("/v1/chat/completions", {**CHAT, "tools": tools, "tool_choice": "required", "max_tokens": 9}),
            ("/v1/completions", {"prompt": "abc", "structured_outputs": {"regex": "a|b"}, "max_tokens": 9}),
        ):
            assert (await server.post(path, body)).status_code == 200
            rendered = (await server.post(f"{path}/render", body)).json()
            rendered = rendered[0] if isinstance(rendered, list) else rendered
            answer = await server.post(PATH, rendered)
            assert answer.status_code == 200, answer.text
            asked, sent = [message for message in core.received if isinstance(message, AddRequest)][-2:]
            assert rendered["sampling_params"]["structured_outputs"]["grammar"].startswith("start: ")
            assert sent.sampling_params.grammar
            assert without_grammar(sent.sampling_params) == without_grammar(asked.sampling_params)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"token_ids": [], "sampling_params": {}}),
        (PATH, {"token_ids": TOKENS}),
        (PATH, {"token_ids": [99999], "sampling_params": {}}),
        (PATH, request(temperature=-1)),
        (PATH, request(max_tokens=100000)),
        (PATH, request(stop=["a"], detokenize=False)),
        (PATH, {**request(), "features": "x", "kv_transfer_params": {"do_remote_decode": True}}),
        ("/v1/chat/completions/render", {"messages": []}),
        ("/v1/chat/completions/render", {**CHAT, "response_format": {"type": "structural_tag"}}),
        ("/v1/completions/render", {"prompt": []}),
    ],
)  # fmt: skip
async def test_what_cannot_be_granted_is_refused(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with running_server(tmp_path) as server:
        assert (await server.post(path, body)).status_code == 400


def without_grammar(params: SamplingParams) -> SamplingParams:
    """The same parameters without a grammar: one of equal meaning has another text and size."""
    return msgspec.structs.replace(params, grammar="", grammar_size=0)


async def test_without_max_tokens_the_context_is_the_limit(tmp_path: Path) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        await server.post(PATH, request())
        await server.post(PATH, request(max_tokens=None))
    limits = [message.sampling_params.max_tokens for message in core.received if isinstance(message, AddRequest)]
    assert limits == [CONTEXT - len(TOKENS)] * 2


async def test_log_probabilities_have_ids_or_texts(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for count in (0, 2):
            answer = (await server.post(PATH, request(logprobs=count))).json()
            (choice,) = answer["choices"]
            entries = choice["logprobs"]["content"]
            assert [entry["token_id"] for entry in entries] == choice["token_ids"]
            for entry in entries:
                assert entry["top_logprobs"][0] == {name: entry[name] for name in ("token_id", "logprob", "rank")}
                ids = [logprob["token_id"] for logprob in entry["top_logprobs"]]
                assert len(ids) == len(set(ids)) >= (1 if count == 0 else 2)
                assert entry["rank"] >= 1
        text = (await server.post(PATH, {**request(logprobs=0), "output_mode": "text"})).json()
    for entry in text["choices"][0]["logprobs"]["content"]:
        (itself,) = entry["top_logprobs"]
        assert itself == {name: entry[name] for name in ("token", "logprob", "bytes")}


async def test_listed_tokens_are_reported_without_a_number(tmp_path: Path) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        answer = await server.post(PATH, request(logprob_token_ids=[7, 3, 7]))
        assert answer.json()["choices"][0]["logprobs"] is not None
        refused = await server.post(PATH, request(logprob_token_ids=[1 << 20]))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_token_ids")
    (message,) = [message for message in core.received if isinstance(message, AddRequest)]
    assert (message.sampling_params.logprobs, message.sampling_params.logprob_token_ids) == (0, (7, 3))


async def test_what_vllm_returns_besides_the_answer(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        asked = {**request(), "return_token_ids": True}
        body = (await server.post(PATH, asked)).json()
        assert (body["prompt_token_ids"], body["model"]) == (TOKENS, "fake")
        assert body["created"] > 0
        options = {"include_usage": True, "continuous_usage_stats": True}
        stream = await server.post(PATH, {**asked, "stream": True, "stream_options": options})
        chunks = chunks_of(stream.text)
        assert chunks[0]["prompt_token_ids"] == TOKENS
        assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
        assert all(chunk["usage"]["prompt_tokens"] == len(TOKENS) for chunk in chunks)
        for fields, param in (
            ({"output_mode": "derender"}, "output_mode"),
            ({"output_mode": "text", "sampling_params": {"detokenize": False}}, "output_mode"),
            ({"features": {"mm_hashes": {}}}, "features"),
            ({"content_parts": [{"type": "image_url"}]}, "content_parts"),
            ({"reasoning_ended": False}, "reasoning_ended"),
            ({"sampling_params": {"prompt_logprob_token_ids": [[1]]}}, "prompt_logprob_token_ids"),
        ):
            refused = await server.post(PATH, {**request(), **fields})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_tokens_are_scored_at_positions_of_the_prompt(tmp_path: Path) -> None:
    name, rows = "prompt_logprob_token_ids", [[8, 16], [24]]
    async with running_server(tmp_path) as server:
        body = (await server.post(PATH, request(**{name: rows}, n=2))).json()
        scores = np.load(io.BytesIO(base64.b64decode(body["prompt_token_id_logprobs"])))
        assert scores.dtype == np.float32
        assert scores.tolist() == [[-1.0, -2.0], [-3.0, -np.inf]]
        assert body["prompt_logprobs"] is None
        late = (await server.post(PATH, request(**{name: [[8]], "prompt_logprob_start": 1}))).json()
        assert np.load(io.BytesIO(base64.b64decode(late["prompt_token_id_logprobs"]))).tolist() == [[-1.0]]
        wrong: list[dict[str, Any]] = [
            {name: [[1]]},
            {name: []},
            {name: [[], []]},
            {name: [[1], [1 << 20]]},
            {name: [[1], [-2]]},
            {name: [list(range(21)), [1]]},
            {name: rows, "prompt_logprobs": 1},
        ]
        for fields in wrong:
            refused = await server.post(PATH, request(**fields))
            assert refused.status_code == 400, fields
            assert name in refused.json()["error"]["message"], fields
        alone = await server.post(PATH, request(prompt_logprob_start=1))
        assert (alone.status_code, alone.json()["error"]["param"]) == (400, "prompt_logprob_start")
        streamed = await server.post(PATH, {**request(**{name: rows}), "stream": True})
        assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, name)
        for path in ("/v1/completions", "/v1/chat/completions"):
            refused = await server.post(path, {"prompt": "hi", **CHAT, name: rows})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
