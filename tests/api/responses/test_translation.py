"""Responses requests as chat requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.api.responses.translation import encode_reasoning, to_chat_request
from quire.protocol.responses import (
    MAX_ITEMS,
    FunctionCall,
    InputMessage,
    ReasoningItem,
    ReasoningText,
    ResponsesRequest,
)
from tests.support.fake_core import FakeCore
from tests.support.responses import PATH, TOOLS, answers_with, ask, prompts, reasoning_server, stream
from tests.support.server import running_server


async def test_nothing_can_be_left_out_of_no_input(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(PATH, {"input": [], "instructions": "x" * 5000, "truncation": "auto"})
    assert answer.status_code == 400


async def test_reasoning_that_the_client_keeps(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}:{{ m.reasoning or '' }}:{{ m.content or '' }}]{% endfor %}"
    core = answers_with("<think>\nRome, then.\n</think>\n\nYes")
    async with reasoning_server(tmp_path, core, chat_template=template) as server:
        body = await ask(server, store=False, include=["reasoning.encrypted_content"])
        item = {**body["output"][0], "content": []}
        await ask(
            server, [{"role": "user", "content": "hi"}, item, body["output"][1], {"role": "user", "content": "so"}]
        )
        foreign = {**item, "encrypted_content": "gAAAAA"}
        refused = await server.post(PATH, {"input": [foreign]})
    assert "[assistant:Rome, then.:Yes]" in prompts(core)[1]
    assert refused.status_code == 400


async def test_old_turns_are_dropped_to_fit(tmp_path: Path) -> None:
    turns: list[Any] = [{"role": "developer", "content": "Rules."}]
    turns += [{"role": "user", "content": f"<{number}>" + "x" * 60} for number in range(12)]
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        refused = await server.post(PATH, {"input": turns, "max_output_tokens": 20})
        assert refused.status_code == 400
        await ask(server, turns, max_output_tokens=20, truncation="auto")
    assert "Rules." in prompts(core)[0]
    assert "<11>" in prompts(core)[0]
    assert "<0>" not in prompts(core)[0]


async def test_the_result_of_a_call_keeps_its_call(tmp_path: Path) -> None:
    items = [
        {"role": "user", "content": "x" * 400},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "warm" + "y" * 60},
    ]
    core = FakeCore()
    async with reasoning_server(tmp_path, core) as server:
        await ask(server, items, tools=TOOLS, truncation="auto", max_output_tokens=20)
        hopeless = {"input": items, "truncation": "auto", "max_output_tokens": 1 << 30}
        assert (await server.post(PATH, hopeless)).status_code == 400
    assert "warm" in prompts(core)[0]
    assert "xxx" not in prompts(core)[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tool_calls": "1000000000000000000000"},
        {"tools": [{"type": "function", "name": "f", "parameters": "DEEP"}]},
        {"input": [{"role": "user", "content": "hi", "more": "DEEP"}]},
        {"input": [{"type": "reasoning", "encrypted_content": "BOMB"}]},
    ],
)
async def test_monsters_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    text = json.dumps({"input": "hi", **fields})
    bomb = encode_reasoning("\0" * (1 << 23))
    text = text.replace('"DEEP"', '{"a":' * 300 + "{}" + "}" * 300).replace("BOMB", bomb)
    async with running_server(tmp_path, tool_call_parser="hermes") as server:
        answer = await server.http.post(PATH, content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert (await ask(server))["status"] == "completed"


async def test_half_characters_in_arguments_are_replaced(tmp_path: Path) -> None:
    core = answers_with('<tool_call>\n{"name": "weather", "arguments": {"city": "\\ud800"}}\n</tool_call>')
    async with reasoning_server(tmp_path, core) as server:
        assert (await ask(server, tools=TOOLS))["output"][0]["type"] == "function_call"
        assert (await stream(server, tools=TOOLS))[-1]["type"] == "response.completed"


@pytest.mark.timeout(30)
def test_items_become_messages_in_linear_time() -> None:
    """At sizes at which quadratic costs would take minutes."""
    body = ResponsesRequest(input="hi")
    rules = [InputMessage(role="developer", content="x")] * 200_000
    (message,) = to_chat_request(body, rules)[0].messages
    assert len(str(message.content)) == 200_000 * 3 - 2
    thoughts = [ReasoningItem(type="reasoning", content=[ReasoningText(text="y" * 50)])] * 200_000
    (message,) = to_chat_request(body, thoughts)[0].messages
    assert len(message.reasoning or "") == 200_000 * 50
    call = FunctionCall(type="function_call", call_id="c", name="f", arguments="{}")
    said = [call, *[InputMessage(role="assistant", content="z" * 50)] * 200_000]
    (message,) = to_chat_request(body, said)[0].messages
    assert len(str(message.content)) == 200_000 * 51 - 1


def test_texts_of_one_turn_are_joined_without_empty_ones() -> None:
    call = FunctionCall(type="function_call", call_id="c", name="f", arguments="{}")
    texts = [InputMessage(role="assistant", content=text) for text in ("", "a", "", "b")]
    (message,) = to_chat_request(ResponsesRequest(input="hi"), [call, *texts])[0].messages
    assert message.content == "a\nb"


async def test_the_number_of_items_has_a_limit(tmp_path: Path) -> None:
    items = [{"role": "user", "content": "x"}] * MAX_ITEMS
    template = "{{ messages | length }}"
    core = FakeCore()
    async with reasoning_server(tmp_path, core, chat_template=template) as server:
        stored = await ask(server, items)
        answer = await server.post(PATH, {"input": [*items, *items[:1]]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
        assert f"at most {MAX_ITEMS}" in answer.text
        more = {"input": "hi", "previous_response_id": stored["id"]}
        answer = await server.post(PATH, more)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
        assert f"at most {MAX_ITEMS}" in answer.text
        answer = await server.post(PATH, {**more, "truncation": "auto"})
        assert answer.status_code == 200
    assert prompts(core)[-1] == str(MAX_ITEMS)


class Text(str):
    """A text whose characters nobody looks at one by one: there may be 30 million."""

    def __iter__(self) -> Any:
        raise AssertionError


def test_a_long_text_is_not_searched_for_items() -> None:
    body = ResponsesRequest(input="hi")
    body.input = Text("hi")
    items = ResponsesRequest(input=[{"role": "user", "content": "hi"}]).input
    assert not isinstance(items, str)
    assert to_chat_request(body, items)[0].messages
