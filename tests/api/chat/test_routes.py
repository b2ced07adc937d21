"""POST /v1/chat/completions, as vLLM and OpenAI have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from quire.engine.client.protocol import AddRequest
from quire.protocol.chat import ChatCompletion
from tests.support.fake_core import FakeCore, says
from tests.support.server import Server, chunks_of, running_server
from tests.support.tokenizer import VOCAB_SIZE, byte_tokenizer

PATH = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]


def prompts(core: FakeCore) -> list[str]:
    """Texts of the prompts that reached the core."""
    return [
        byte_tokenizer().decode(message.prompt.tolist(), skip_special_tokens=False)
        for message in core.received
        if isinstance(message, AddRequest)
    ]


async def ask(server: Server, **fields: Any) -> dict[str, Any]:
    answer = await server.post(PATH, {"messages": HI, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_a_conversation_is_answered(tmp_path: Path) -> None:
    core = FakeCore(answer=says("hello"))
    async with running_server(tmp_path, core) as server:
        body = await ask(server, messages=[{"role": "system", "content": "be brief"}, *HI])
        ChatCompletion.model_validate(body)
        assert body["object"] == "chat.completion"
        (choice,) = body["choices"]
        absent = ("refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content")
        nothing = dict.fromkeys(absent)  # clients read them as attributes
        assert choice["message"] == {"role": "assistant", "content": "hello", **nothing}
        assert choice["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 6
    assert prompts(core) == [
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ]


async def test_a_stream_comes_in_order(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("hello"))) as server:
        options = {"include_usage": True}
        answer = await server.post(PATH, {"messages": HI, "n": 2, "stream": True, "stream_options": options})
        *chunks, usage = chunks_of(answer.text)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 12
        for index in range(2):
            choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(choice["delta"]["content"] for choice in choices) == "hello"
            assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert all(chunk["usage"] is None for chunk in chunks)
        *chunks, _ = chunks_of((await server.post(PATH, {"messages": HI, "stream": True})).text)
        assert all("usage" not in chunk for chunk in chunks)


async def test_content_parts_and_empty_contents(tmp_path: Path) -> None:
    core = FakeCore(answer=says("ok"))
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, {"text": "three"}, "four"]
    async with running_server(tmp_path, core) as server:
        await ask(server, messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None}])
    assert prompts(core)[0].startswith("<|im_start|>user\none\ntwo\nthree\nfour<|im_end|>\n<|im_start|>assistant\n<|im")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "text"},
        {"type": "text", "text": 5},
        {},
        5,
    ],
)
async def test_parts_that_are_no_text_are_refused(tmp_path: Path, part: Any) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(PATH, {"messages": [{"role": "user", "content": [part]}]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("messages")


async def test_every_role_reaches_the_template(tmp_path: Path) -> None:
    core = FakeCore(answer=says("ok"))
    roles = ["system", "developer", "user", "assistant", "tool", "critic"]
    async with running_server(tmp_path, core) as server:
        await ask(server, messages=[{"role": role, "content": "x"} for role in roles])
    assert [line.removeprefix("<|im_start|>") for line in prompts(core)[0].split("\n")[::2]][:-1] == roles


async def test_tool_calls_of_the_past_reach_the_template_as_objects(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
    )
    core = FakeCore(answer=says("ok"))
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "ok"}]
    async with running_server(tmp_path, core, chat_template=template) as server:
        await ask(server, messages=history)
        call["function"] = {"name": "weather", "arguments": "{"}
        assert (await server.post(PATH, {"messages": history})).status_code == 400
    assert prompts(core) == ["weather(Rome)"]


async def test_tools_reach_the_template_if_calls_may_stay_text(tmp_path: Path) -> None:
    template = "{{ tools[0].function.name if tools else 'none' }}: {{ messages[0].content }}"
    core = FakeCore(answer=says("<tool_call>"))
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    async with running_server(tmp_path, core, chat_template=template) as server:
        body = await ask(server, tools=tools, tool_choice="none")
        assert body["choices"][0]["message"]["content"] == "<tool_call>"
        await ask(server, tools=[])
        for refused in ({"tools": tools}, {"tools": tools, "tool_choice": "auto"}, {"tool_choice": "required"}):
            answer = await server.post(PATH, {"messages": HI, **refused})
            assert answer.status_code == 400
            assert "tool" in answer.json()["error"]["param"]
    assert prompts(core) == ["weather: hi", "none: hi"]


async def test_template_variables(tmp_path: Path) -> None:
    template = "{{ messages[0].content }} {{ mood }}{{ level }}{% if add_generation_prompt %}!{% endif %}"
    core = FakeCore(answer=says("ok"))
    async with running_server(
        tmp_path, core, chat_template=template, default_chat_template_kwargs={"mood": "calm", "level": 1}
    ) as server:
        await ask(server)
        await ask(server, chat_template_kwargs={"mood": "gay"}, add_generation_prompt=False)
        answer = await server.post(PATH, {"messages": HI, "chat_template_kwargs": {"colour": "red"}})
        assert answer.headers["x-quire-ignored-fields"] == "chat_template_kwargs.colour"
        answer = await server.post(PATH, {"messages": HI, "chat_template_kwargs": {"messages": []}})
        assert answer.status_code == 400
        answer = await server.post(PATH, {"messages": HI, "reasoning_effort": "high"})
        assert answer.json()["error"]["param"] == "reasoning_effort"
    assert prompts(core)[:2] == ["hi calm1!", "hi gay1"]


async def test_reasoning_effort_reaches_templates_that_read_it(tmp_path: Path) -> None:
    core = FakeCore(answer=says("ok"))
    async with running_server(tmp_path, core, chat_template="{{ reasoning_effort }}") as server:
        await ask(server, reasoning_effort="high")
    assert prompts(core) == ["high"]


async def test_the_roles_chunk_counts_no_tokens(tmp_path: Path) -> None:
    core = FakeCore(answer=says("<think>a</think>b"))
    async with running_server(tmp_path, core) as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await server.post(PATH, {"messages": HI, "stream": True, "stream_options": options})
        *chunks, last = [chunk["usage"] for chunk in chunks_of(answer.text)]
    counts = [usage["completion_tokens"] for usage in chunks]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == last["completion_tokens"]
    assert chunks[0]["total_tokens"] == chunks[0]["prompt_tokens"] == last["prompt_tokens"]
    assert chunks[0]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_the_server_may_always_stream_usage_and_write_tokens_as_ids(tmp_path: Path) -> None:
    core = FakeCore(answer=says("hello"))
    settings: Any = {"enable_force_include_usage": True, "return_tokens_as_token_ids": True}
    async with running_server(tmp_path, core, **settings) as server:
        for path, body in ((PATH, {"messages": HI}), ("/v1/completions", {"prompt": "hi"})):
            *_, last = chunks_of((await server.post(path, {**body, "stream": True})).text)
            assert last["usage"]["completion_tokens"] == 6
        (first, *_) = (await ask(server, logprobs=True))["choices"][0]["logprobs"]["content"]
        assert first["token"].startswith("token_id:")
        named = await ask(server, logprobs=True, return_tokens_as_token_ids=False)
        assert named["choices"][0]["logprobs"]["content"][0]["token"] == "h"


async def test_templates_of_requests_need_trust(tmp_path: Path) -> None:
    core = FakeCore(answer=says("ok"))
    body = {"messages": HI, "chat_template": "own {{ messages[0].content }}"}
    async with running_server(tmp_path, core) as server:
        assert (await server.post(PATH, body)).json()["error"]["param"] == "chat_template"
    async with running_server(tmp_path, core, trust_request_chat_template=True) as server:
        assert (await server.post(PATH, body)).status_code == 200
        for bad in ("{% if %}", "{{ raise_exception('no') }}", "{{ messages.x.y }}", "{{ ''.__class__.__mro__ }}"):
            answer = await server.post(PATH, {"messages": HI, "chat_template": bad})
            assert answer.status_code == 400, bad
    assert prompts(core) == ["own hi"]


async def test_a_final_message_is_continued(tmp_path: Path) -> None:
    core = FakeCore(answer=says(" more"))
    history = [*HI, {"role": "assistant", "content": "I say "}]
    async with running_server(tmp_path, core) as server:
        body = await ask(server, messages=history, continue_final_message=True)
        assert body["choices"][0]["message"]["content"] == " more"
        body = await ask(server, messages=history, continue_final_message=True, echo=True)
        assert body["choices"][0]["message"]["content"] == "I say  more"
        parts = [{"type": "text", "text": "I"}, {"type": "text", "text": "say"}]
        history[-1] = {"role": "assistant", "content": parts}
        body = await ask(server, messages=history, continue_final_message=True, echo=True)
        assert body["choices"][0]["message"]["content"] == "I\nsay more"
        both = {"messages": history, "continue_final_message": True, "add_generation_prompt": True}
        assert (await server.post(PATH, both)).status_code == 400
    assert prompts(core)[0].endswith("<|im_start|>assistant\nI say ")


async def test_reasoning_is_split_off(tmp_path: Path) -> None:
    core = FakeCore(answer=says("<think>\nwell, 1+1\n</think>\n\n2"))
    async with running_server(tmp_path, core) as server:
        body = await ask(server)
        message = body["choices"][0]["message"]
        assert message["content"] == "2"
        assert message["reasoning"] == message["reasoning_content"] == "well, 1+1"
        reasoning_tokens = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert reasoning_tokens == 13
        hidden = await ask(server, include_reasoning=False)
        message = hidden["choices"][0]["message"]
        assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("2", None, None)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = chunks_of((await server.post(PATH, {"messages": HI, **options})).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "well, 1+1"
        assert "".join(delta.get("content", "") for delta in deltas) == "2"
        assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == reasoning_tokens


async def test_an_answer_that_is_only_reasoning_has_no_content(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("<think>well, 1+1"))) as server:
        (choice,) = (await ask(server))["choices"]
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "well, 1+1")


async def test_reasoning_goes_on_where_a_final_message_left_off(tmp_path: Path) -> None:
    core = FakeCore(answer=says(" + 1</think>\n28"))
    history = [*HI, {"role": "assistant", "content": "<think>\n27"}]
    async with running_server(tmp_path, core) as server:
        for cut in ({}, {"truncate_prompt_tokens": 3}):
            message = (await ask(server, messages=history, continue_final_message=True, **cut))["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == (" + 1", "28")


@pytest.mark.parametrize(("side", "begin", "end"), [("left", 3, 8), ("right", 0, 5), (None, 3, 8)])
async def test_the_side_of_a_prompt_that_is_cut(tmp_path: Path, side: str | None, begin: int, end: int) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core, chat_template="{{ messages[0].content }}") as server:
        messages = [{"role": "user", "content": "abcdefgh"}]
        await ask(server, messages=messages, truncate_prompt_tokens=5, truncation_side=side)
    (message,) = [message for message in core.received if isinstance(message, AddRequest)]
    assert byte_tokenizer().decode(message.prompt.tolist()) == "abcdefgh"[begin:end]


async def test_reasoning_that_a_template_opened_is_known_behind_a_cut(tmp_path: Path) -> None:
    core = FakeCore(answer=says("1</think>2"))
    async with running_server(tmp_path, core, chat_template="{{ messages[0].content }}<think>\n") as server:
        body = await ask(server, messages=[{"role": "user", "content": "long" * 200}], truncate_prompt_tokens=5)
        assert (body["choices"][0]["message"]["reasoning"], body["choices"][0]["message"]["content"]) == ("1", "2")


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_streams_and_plain_answers_count_the_same_reasoning(tmp_path: Path, most: int) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("<think>abc</think>d"))) as server:
        plain = (await ask(server, max_tokens=most))["usage"]
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": most}
        chunks = chunks_of((await server.post(PATH, {"messages": HI, **options})).text)
        assert chunks[-1]["usage"] == plain
        assert plain["completion_tokens_details"]["reasoning_tokens"] == most


async def test_reasoning_stays_in_the_text_if_wanted(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("<think>a</think>b")), reasoning_parser="none") as server:
        assert (await ask(server))["choices"][0]["message"]["content"] == "<think>a</think>b"


async def test_logprobs_of_the_whole_vocabulary(tmp_path: Path) -> None:
    async with running_server(tmp_path, max_logprobs=-1) as server:
        body = await ask(server, logprobs=True, top_logprobs=-1)
        assert len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == VOCAB_SIZE


async def test_logprobs_follow_openais_shape(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("a\u20ac"))) as server:
        body = await ask(server, logprobs=True, top_logprobs=2)
        content = body["choices"][0]["logprobs"]["content"]
        assert content[0]["token"] == "a"
        assert content[0]["bytes"] == [97]
        assert [entry["token"] for entry in content[0]["top_logprobs"]] == ["a", "b"]
        assert [entry["bytes"] for entry in content[1:4]] == [[0xE2], [0x82], [0xAC]]
        plain = await ask(server, logprobs=True)
        assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
        options = {"logprobs": True, "top_logprobs": 2, "stream": True}
        chunks = chunks_of((await server.post(PATH, {"messages": HI, **options})).text)
        streamed = [
            entry
            for chunk in chunks
            if chunk["choices"][0]["logprobs"]
            for entry in chunk["choices"][0]["logprobs"]["content"]
        ]
        assert streamed == content
        assert (await server.post(PATH, {"messages": HI, "top_logprobs": 2})).status_code == 400
        many = await server.post(PATH, {"messages": HI, "logprobs": True, "top_logprobs": 21})
        assert many.json()["error"]["param"] == "top_logprobs"


async def test_max_tokens_under_both_names(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(answer=says("x" * 600))) as server:
        for fields, count in (
            ({"max_tokens": 5}, 5),
            ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
            ({}, 512 - 21),
        ):
            body = await ask(server, **fields)
            assert body["usage"]["completion_tokens"] == count
            assert body["choices"][0]["finish_reason"] == "length"


async def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        server.state.models[0].renderer._builder.sources.clear()
        answer = await server.post(PATH, {"messages": HI})
        assert answer.status_code == 400
        assert "template" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": None},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "", "content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": "hi"},
        {"max_tokens": 0},
        {"max_completion_tokens": 600},
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": -1, "logprobs": True},
        {"functions": [{"name": "f"}]},
        {"function_call": "auto"},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}},
        {"web_search_options": {"a": 1}},
        {"verbosity": "high"},
    ],
)
async def test_what_cannot_be_done_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(PATH, {"messages": HI, **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


async def test_harmless_fields_are_accepted_and_unknown_ones_named(tmp_path: Path) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "prompt_cache_key": "x",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "best_of": 1,
        "functions": [],
        "audio": None,
    }
    async with running_server(tmp_path) as server:
        answer = await server.post(PATH, {"messages": HI, **harmless})
        assert answer.status_code == 200
        assert "x-quire-ignored-fields" not in answer.headers
        for stream in (False, True):
            answer = await server.post(PATH, {"messages": HI, "stream": stream, "warp": 9, "we\u20acird\n": 1})
            assert answer.headers["x-quire-ignored-fields"] == "warp, we%E2%82%ACird%0A"
    async with running_server(tmp_path, strict_fields=True) as server:
        assert (await server.post(PATH, {"messages": HI, **harmless})).status_code == 200
        answer = await server.post(PATH, {"messages": HI, "warp": 9})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "warp"


async def test_the_openai_client(tmp_path: Path) -> None:
    hello = FakeCore(answer=says("hello"))
    async with (
        running_server(tmp_path, hello) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        models = [model.id async for model in client.models.list()]
        assert models == ["fake", "alias"]
        assert (await client.models.retrieve("alias")).id == "alias"
        whole = await client.chat.completions.create(model="fake", messages=HI)
        assert whole.choices[0].message.content == "hello"
        assert whole.usage is not None
        assert whole._request_id == whole.id.removeprefix("chatcmpl-")
        stream = await client.chat.completions.create(model="fake", messages=HI, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "hello"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=HI)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="fake", messages=HI, temperature=-1)
