"""Custom tools: a text where functions have JSON, in chats and in responses, whole and streamed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.client.protocol import AddRequest
from quire.parsing.tools.custom_input import CustomInputReader
from tests.support.fake_core import FakeCore, says
from tests.support.server import Server, running_server
from tests.support.tokenizer import byte_tokenizer

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
PATCH = '*** Begin Patch\n*** Update File: "é\\n".py\n+\tprint("\U0001f600")\n*** End Patch'
CALL = f"<tool_call>\n{json.dumps({'name': 'apply_patch', 'arguments': {'input': PATCH}})}\n</tool_call>"
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TEMPLATE = (
    "{% for t in tools or () %}{{ t.type }} {{ t.function.name }}{{ t.function.parameters.properties | tojson }}"
    "{{ t.function.description }}{% endfor %}{% for m in messages %}[{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.type }} {{ c.function.name }} {{ c.function.arguments.input }}{% endfor %}]"
    "{% endfor %}"
)
TOOL: dict[str, Any] = {"name": "apply_patch", "description": "Change files.", "format": {"type": "text"}}
CHAT_TOOLS: list[dict[str, Any]] = [
    {"type": "custom", "custom": TOOL},
    {"type": "function", "function": {"name": "now", "parameters": {"properties": {}}}},
]
TOOLS: list[dict[str, Any]] = [
    {"type": "custom", **TOOL},
    {"type": "function", "name": "now", "parameters": {"properties": {}}},
]


def formatted(syntax: str, definition: str) -> dict[str, Any]:
    """A tool whose texts are of a grammar."""
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {**TOOL, "format": form}}


def serving(folder: Path, core: FakeCore) -> Any:
    return running_server(folder, core, tool_call_parser="hermes", chat_template=TEMPLATE)


async def chat(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": CHAT_TOOLS, **fields}
    answer = await server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def respond(server: Server, input_items: Any = "hi", **fields: Any) -> dict[str, Any]:
    answer = await server.post(RESPONSES, {"input": input_items, "tools": TOOLS, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def prompts(core: FakeCore) -> list[str]:
    added = [message for message in core.received if isinstance(message, AddRequest)]
    return [byte_tokenizer().decode(message.prompt.tolist(), skip_special_tokens=False) for message in added]


def read(pieces: list[str]) -> str:
    reader = CustomInputReader()
    return "".join([*(reader.push(piece) for piece in pieces), reader.push("", last=True)])


@settings(max_examples=300, deadline=None)
@given(st.text(), st.booleans(), st.lists(st.integers(0, 400), max_size=8))
def test_an_input_comes_out_of_its_json_however_that_is_cut(text: str, escaped: bool, at: list[int]) -> None:
    text = text.encode("utf-8", "replace").decode()
    arguments = json.dumps({"reason": {"a": [text]}, "input": text, "more": 1}, ensure_ascii=escaped)
    places = sorted(min(place, len(arguments)) for place in at)
    assert read([arguments[begin:end] for begin, end in pairwise([0, *places, len(arguments)])]) == text
    assert read(list(arguments)) == text


@settings(max_examples=400, deadline=None)
@given(st.text('{}":, \\uUdD8cC0npt/input\n', max_size=40), st.booleans())
def test_what_is_no_json_is_read_all_the_same(text: str, begun: bool) -> None:
    arguments = f'{{"input": "{text}' if begun else text
    assert read(list(arguments)) == read([arguments])
    read([arguments]).encode()  # whole characters


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\ud83d', "a\ufffd"),
        ('{"input": "a\\ud83dx"}', "a\ufffdx"),
        ('{"input": "a\\ud83d\\n"}', "a\ufffd\n"),
        ('{"input": "a\\', "a"),
        ('{"input": "\\d+ \\u12zz"}', "\\d+ \\u12zz"),
        ('{"input": "line\nbreak"}', "line\nbreak"),
        ('{"input": {"a": 1}}', '{"a": 1}'),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ("*** Begin Patch", "*** Begin Patch"),
        ("{}", ""),
        ('{ "inp', ""),
        ('{"input": ', ""),
        ("", ""),
    ],
)
def test_arguments_that_are_not_as_they_should_be(arguments: str, text: str) -> None:
    assert read([arguments]) == read(list(arguments)) == text


def test_an_input_is_streamed_while_it_is_generated() -> None:
    reader = CustomInputReader()
    assert [reader.push(piece) for piece in ('{"input": "ab', "\\", "n\\ud83d", "\\ude00c")] == ["ab", "", "\n", "😀c"]


async def test_a_chat_is_answered_with_a_custom_call(tmp_path: Path) -> None:
    core = FakeCore(answer=says(f"So.\n{CALL}\n{NOW}"))
    async with serving(tmp_path, core) as server:
        choice = await chat(server)
    custom, function = choice["message"]["tool_calls"]
    assert (custom["type"], custom["custom"]) == ("custom", {"name": "apply_patch", "input": PATCH})
    assert (function["type"], function["function"]) == ("function", {"name": "now", "arguments": "{}"})
    assert (choice["message"]["content"], choice["finish_reason"]) == ("So.", "tool_calls")
    assert 'function apply_patch{"input": {"type": "string"}}Change files.' in prompts(core)[0]


async def test_a_streamed_chat_adds_up_to_the_same(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeCore(answer=says(CALL))) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": CHAT_TOOLS, "stream": True}
        lines = [line.removeprefix("data: ") for line in (await server.post(CHAT, body)).text.split("\n\n") if line]
    deltas = [json.loads(line)["choices"][0]["delta"].get("tool_calls", ()) for line in lines[:-1]]
    first, *others = [call for calls in deltas for call in calls]
    assert (first["index"], first["type"], first["custom"]) == (0, "custom", {"name": "apply_patch", "input": ""})
    assert "".join(call["custom"]["input"] for call in others) == PATCH


async def test_a_chat_goes_on_behind_a_custom_call(tmp_path: Path) -> None:
    core = FakeCore(answer=says("ok"))
    async with serving(tmp_path, core) as server:
        call = {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": PATCH}}
        turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "Done"}]
        await chat(server, messages=turns)
        broken = {"id": "c", "type": "custom", "custom": {"name": "apply_patch"}}
        refused = await server.post(CHAT, {"messages": [{"role": "assistant", "tool_calls": [broken]}]})
        tokens = await server.post("/tokenize", {"messages": turns, "tools": CHAT_TOOLS})
    assert f"[assistant:function apply_patch {PATCH}][tool:Done]" in prompts(core)[0]
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[0].tool_calls[0]"
    assert tokens.json()["count"] > len(PATCH)


@pytest.mark.parametrize(
    ("choice", "finish"),
    [
        ("required", "tool_calls"),
        ({"type": "custom", "custom": {"name": "apply_patch"}}, "stop"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "custom", "custom": {"name": "apply_patch"}}, {"function": {"name": "now"}}],
                },
            },
            "tool_calls",
        ),
    ],
)
async def test_a_custom_call_that_has_to_be_is_held_to_its_form(tmp_path: Path, choice: Any, finish: str) -> None:
    core = FakeCore(answer=says(CALL))
    async with serving(tmp_path, core) as server:
        answer = await chat(server, tool_choice=choice)
    assert answer["message"]["tool_calls"][0]["custom"]["input"] == PATCH
    assert answer["finish_reason"] == finish
    (added,) = [message for message in core.received if isinstance(message, AddRequest)]
    assert '"input": {"type": "string"}' in added.sampling_params.grammar


async def test_a_response_has_an_item_for_a_custom_call(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeCore(answer=says(f"So.\n{CALL}\n{NOW}"))) as server:
        body = await respond(server)
        answer = await server.post(RESPONSES, {"input": "hi", "tools": TOOLS, "stream": True})
    message, custom, function = body["output"]
    assert custom.pop("id").startswith("ctc_")
    assert custom.pop("call_id")
    assert custom == {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH, "status": "completed"}
    assert (message["type"], function["type"]) == ("message", "function_call")
    assert body["tools"] == TOOLS
    events = [json.loads(block.split("\ndata: ")[1]) for block in answer.text.split("\n\n")[:-1]]
    item_events = [event for event in events if event.get("output_index") == 1]
    kinds = [event["type"].removeprefix("response.") for event in item_events]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert (item_events[0]["item"]["input"], item_events[0]["item"]["status"]) == ("", "in_progress")
    assert "".join(event["delta"] for event in item_events if "delta" in event) == item_events[-2]["input"] == PATCH
    assert {event["item_id"] for event in item_events[1:-1]} == {item_events[0]["item"]["id"]}
    assert item_events[-1]["item"] == events[-1]["response"]["output"][1]


async def test_a_response_goes_on_behind_a_custom_call(tmp_path: Path) -> None:
    core = FakeCore(answer=says(CALL))
    async with serving(tmp_path, core) as server:
        first = await respond(server)
        call = first["output"][0]
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done"}
        stored = await respond(server, [result], previous_response_id=first["id"])
        parts = {**result, "output": [{"type": "input_text", "text": "Done"}]}
        await respond(server, [{"role": "user", "content": "hi"}, call, parts], store=False)
        listed = (await server.http.get(f"{RESPONSES}/{stored['id']}/input_items", params={"order": "asc"})).json()
    for prompt in prompts(core)[1:]:
        assert f"[user:hi][assistant:function apply_patch {PATCH}][tool:Done]" in prompt
    assert [item["type"] for item in listed["data"]] == ["message", "custom_tool_call", "custom_tool_call_output"]
    assert listed["data"][2]["id"].startswith("ctco_")


async def test_the_result_of_a_custom_call_keeps_its_call(tmp_path: Path) -> None:
    items = [
        {"role": "user", "content": "x" * 400},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
    ]
    core = FakeCore(answer=says("ok"))
    async with serving(tmp_path, core) as server:
        await respond(server, items, truncation="auto", max_output_tokens=20, tools=TOOLS[1:])
    assert f"{PATCH}][tool:Done]" in prompts(core)[0]
    assert "xxx" not in prompts(core)[0]


async def test_a_response_can_require_a_named_custom_tool(tmp_path: Path) -> None:
    core = FakeCore(answer=says(CALL))
    async with serving(tmp_path, core) as server:
        for choice in (
            {"type": "custom", "name": "apply_patch"},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
        ):
            body = await respond(server, tool_choice=choice)
            assert body["tool_choice"] == choice
            assert body["output"][0]["input"] == PATCH
    for added in (message for message in core.received if isinstance(message, AddRequest)):
        assert "apply_patch" in added.sampling_params.grammar
        assert "now" not in added.sampling_params.grammar


async def test_a_format_is_kept_to_wherever_the_tool_is_called(tmp_path: Path) -> None:
    core = FakeCore(answer=says(CALL))
    form = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    async with serving(tmp_path, core) as server:
        await chat(server, tools=[formatted("regex", "a+")])
        body = await respond(server, tools=[{**TOOLS[0], "format": form}])
    assert body["tools"][0]["format"] == form
    for added in (message for message in core.received if isinstance(message, AddRequest)):
        assert '"pattern": "^(?:a+)$"' in added.sampling_params.grammar
    assert '"pattern": "^(?:a+)$"' in prompts(core)[0]


async def test_a_format_that_cannot_be_kept_to_is_refused(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [formatted("regex", "a+")], "max_tokens": 5}
    async with running_server(tmp_path, FakeCore(answer=says("ok")), tool_call_parser="pythonic") as server:
        refused = await server.post(CHAT, body)
        assert (await server.post(CHAT, {**body, "tool_choice": "required"})).status_code == 200
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools"


async def test_what_a_custom_tool_does_not_have_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeCore(answer=says("ok"))) as server:
        answer = await server.post(RESPONSES, {"input": "hi", "tools": [{**TOOLS[0], "strict": True}]})
    assert answer.headers["x-quire-ignored-fields"] == "tools[0].strict"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x", "strict": True}}]}, "tools[0].custom.strict"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "y"}}}]}, "tools[0].custom.f"),
        (CHAT, {"tools": [{"type": "other", "other": {}}]}, "tools[0]"),
        (CHAT, {"tools": [*CHAT_TOOLS, {"type": "function", "function": {"name": "apply_patch"}}]}, "tools"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "apply_patch"}}}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "custom", "custom": {"name": "now"}}}, "tool_choice"),
        (CHAT, {"tools": [formatted("lark", 'start: "a"')]}, "tools"),
        (CHAT, {"tools": [formatted("regex", "(")]}, "tools"),
        (CHAT, {"tools": [formatted("yacc", "a")]}, "tools[0].custom.format"),
        (RESPONSES, {"tools": [{"type": "custom"}]}, "tools[0].name"),
        (
            RESPONSES,
            {"tools": [{**TOOLS[0], "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}]},
            "tools",
        ),
        (RESPONSES, {"tool_choice": {"type": "custom", "name": "other"}}, "tool_choice"),
        (RESPONSES, {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "x"}]}, "input"),
    ],
)
async def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, path: str, fields: dict[str, Any], param: str
) -> None:
    base = {"tools": CHAT_TOOLS, "messages": [{"role": "user", "content": "hi"}]}
    async with serving(tmp_path, FakeCore(answer=says("ok"))) as server:
        answer = await server.post(path, {**(base if path == CHAT else {"tools": TOOLS, "input": "hi"}), **fields})
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["param"] or "").startswith(param), answer.text
