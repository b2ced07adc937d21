"""/v1/responses over a core without a model: items, events, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.client.protocol import AddRequest
from tests.support.fake_core import FakeCore
from tests.support.responses import PATH, TOOLS, answers_with, ask, output_text, reasoning_server, stream
from tests.support.server import running_server
from tests.support.tokenizer import byte_tokenizer


async def test_an_answer_is_a_message(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = await ask(server, "hello", metadata={"a": "b"}, temperature=0.5, user="me")
    assert body["object"] == "response"
    assert body["id"].startswith("resp_")
    assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
    (message,) = body["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert "HELLO" in output_text(body)
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]
    assert (body["metadata"], body["temperature"], body["user"]) == ({"a": "b"}, 0.5, "me")
    assert body["text"] == {"verbosity": "medium", "format": {"type": "text"}}


async def test_prompts_and_answers_are_returned_if_wanted(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = await ask(server, "hello", enable_response_messages=True)
        *_, last = await stream(server, "hello", enable_response_messages=True)
        stored = (await server.http.get(f"{PATH}/{body['id']}")).json()
        plain = await ask(server, "hello")
    (prompt,), (answer,) = body["input_messages"], body["output_messages"]
    assert prompt["type"] == answer["type"] == "raw_message_tokens"
    assert "hello" in prompt["message"]
    assert prompt["message"] == byte_tokenizer().decode(prompt["tokens"], skip_special_tokens=False)
    assert answer["message"] == output_text(body)
    assert len(answer["tokens"]) == body["usage"]["output_tokens"]
    assert last["response"]["output_messages"] == stored["output_messages"] == body["output_messages"]
    assert "input_messages" not in plain


async def test_thoughts_and_calls_are_items(tmp_path: Path) -> None:
    async with reasoning_server(tmp_path, answers_with()) as server:
        body = await ask(server, tools=TOOLS)
        hidden = await ask(server, tools=TOOLS, include_reasoning=False)
    thought, message, call = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Rome, then."}]
    assert message["content"][0]["text"] == "Let me see."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", {"city": "Rome"})
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert [item["type"] for item in hidden["output"]] == ["message", "function_call"]


async def test_tools_of_others_are_left_out_by_name(tmp_path: Path) -> None:
    async with reasoning_server(tmp_path, answers_with()) as server:
        answer = await server.post(PATH, {"input": "hi", "tools": TOOLS})
        refused = await server.post(PATH, {"input": "hi", "tools": TOOLS[1:], "tool_choice": "required"})
    assert "tools[1]" in answer.headers["x-quire-ignored-fields"]
    assert "web_search" in answer.headers["x-quire-ignored-fields"]
    assert refused.status_code == 400


async def test_events_tell_the_same_as_the_whole(tmp_path: Path) -> None:
    async with reasoning_server(tmp_path, answers_with()) as server:
        events = await stream(server, tools=TOOLS)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[0]["response"]["output"] == []
    whole = events[-1]["response"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["item"]["status"] for event in added] == ["in_progress"] * 3
    assert added[0]["item"]["content"] == added[1]["item"]["content"] == []
    assert added[2]["item"]["arguments"] == ""
    for place, item in enumerate(whole["output"]):
        item_events = [event for event in events if event.get("output_index") == place]
        assert {event["item_id"] for event in item_events if "item_id" in event} == {item["id"]}
        text = "".join(event["delta"] for event in item_events if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert item_events[-1]["item"] == item


async def test_answers_that_break_off_are_incomplete(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = await ask(server, "hello", max_output_tokens=3)
        events = await stream(server, "hello", max_output_tokens=3)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


async def test_log_probabilities_come_with_the_text(tmp_path: Path) -> None:
    async with reasoning_server(tmp_path, answers_with("<think>\nHm\n</think>\n\nabc")) as server:
        fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        body = await ask(server, **fields)
        events = await stream(server, **fields)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    streamed_entries = [entry for event in deltas for entry in event["logprobs"]]
    assert body["output"][1]["content"][0]["logprobs"] == streamed_entries
    assert "".join(streamed_entry["token"] for streamed_entry in streamed_entries).strip() == "abc"


async def test_a_format_is_kept_to(tmp_path: Path) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        body = await ask(server, text={"format": form})
        assert body["text"]["format"] == form
    (added,) = [message for message in core.received if isinstance(message, AddRequest)]
    assert added.sampling_params.grammar


FIRST_PART = "input[0].content[0]"
CALL = {"type": "function_call", "call_id": "c", "name": "f"}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"background": True, "store": False}, 400, "background"),
        ({"previous_response_id": "resp_nowhere"}, 404, "previous_response_id"),
        ({"conversation": "conv_1"}, 400, "conversation"),
        ({"prompt": {"id": "p"}}, 400, "prompt"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, None),
        ({"input": []}, 400, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            400,
            f"{FIRST_PART}.file_id",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, 400, FIRST_PART),
        ({"input": [{"role": "user", "content": "a"}, {**CALL, "arguments": "{"}]}, 400, "input[1]"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, 400, "input[0].encrypted_content"),
        ({"input": [{"role": "nobody", "content": "a"}]}, 400, "input[0].role"),
        ({"max_output_tokens": 100_000}, 400, "max_output_tokens"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": [{"type": "mcp", "server_label": "x", "require_approval": "never"}]}, 400, "tools[0].server_label"),
        ({"include": ["nothing"]}, 400, None),
        ({"metadata": {"a": "b" * 513}}, 400, None),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"top_logprobs": 1000}, 400, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, 400, None),
        ({"model": "nobody"}, 404, "model"),
    ],
)
async def test_what_cannot_be_granted_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], status: int, param: str | None
) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(PATH, {"input": "hi", **fields})
        assert answer.status_code == status, answer.text
        if param is not None:
            assert answer.json()["error"]["param"] == param
        assert (await ask(server))["status"] == "completed"


async def test_an_error_of_the_template_names_the_input(tmp_path: Path) -> None:
    async with running_server(tmp_path, chat_template="{{ raise_exception('no') }}") as server:
        error = (await server.post(PATH, {"input": "hi"})).json()["error"]
        assert error["param"] == "input"


async def test_an_item_of_an_unknown_type_is_named(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        error = (await server.post(PATH, {"input": [{"type": "computer_call"}]})).json()["error"]
        assert error["message"].startswith(
            "input[0]: The type 'computer_call' is not supported; supported: 'message', "
        )
