"""Undeclared and unused request fields."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import running_server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
PART = {"type": "text", "text": "hi"}
INPUT = {"type": "input_text", "text": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": [USER], "documents": [{"text": "x"}]}, "documents"),
        (CHAT, {"messages": [USER], "tools": TOOLS, "tool_choice": "none"}, "tools"),
        (CHAT, {"messages": [USER], "tools": [], "documents": []}, None),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a"),
        ("/tokenize", {"messages": [USER], "tools": TOOLS}, "tools"),
        ("/tokenize", {"messages": [USER], "continue_final_message": True}, None),
        ("/tokenize", {"prompt": "x", "tools": TOOLS, "chat_template": "y"}, "tools, chat_template"),
        ("/tokenize", {"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True, "tools": []}, None),
        ("/tokenize", {"prompt": "x", "stream_options": {"a": 1}}, "stream_options"),
        ("/detokenize", {"tokens": [1], "stream_options": {}}, "stream_options"),
        (CHAT, {"messages": [{**USER, "odd": 1}, {**USER, "odd": 1}]}, "messages[0].odd"),
        (CHAT, {"messages": [{**USER, "annotations": [1], "cache_control": {}, "odd": None}]}, None),
        (CHAT, {"messages": [{"role": "user", "content": [{**PART, "cache_control": {"type": "x"}}]}]}, None),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [PART, {**PART, "x": 1}]}]},
            "messages[0].content[1].x",
        ),
        (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, "index": 0}]}]}, None),
        (
            CHAT,
            {"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, "odd": 0}]}]},
            "messages[1].tool_calls[0].odd",
        ),
        (CHAT, {"messages": [USER], "stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
        (CHAT, {"messages": [USER], "vllm_xargs": {"a": 1, "b": ["x"]}}, "vllm_xargs.a, vllm_xargs.b"),
        (COMPLETIONS, {"prompt": "x", "vllm_xargs": {"a": 1.5}}, "vllm_xargs.a"),
        (RESPONSES, {"input": [{**USER, "odd": 1}]}, "input[0].odd"),
        (RESPONSES, {"input": [{"role": "user", "content": [{**INPUT, "odd": 1}]}]}, "input[0].content[0].odd"),
        (RESPONSES, {"input": "x", "text": {"odd": 1}, "reasoning": {"odd": 1}}, "reasoning.odd, text.odd"),
        (RESPONSES, {"input": "x", "client_metadata": {"a": "b"}}, None),
        (MESSAGES, {"messages": [{**USER, "odd": 1}]}, "messages[0].odd"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{**PART, "odd": 1}]}]}, "messages[0].content[0].odd"),
        (MESSAGES, {"messages": [USER], "system": [{**PART, "cache_control": {"type": "ephemeral"}}]}, None),
        (MESSAGES, {"messages": [USER], "context_management": {"edits": []}}, "context_management"),
        (MESSAGES, {"messages": [USER], "output_config": {"effort": "low"}}, "output_config.effort"),
        (MESSAGES, {"messages": [USER], "output_config": {"odd": 1}}, "output_config.odd"),
        (COUNT, {"messages": [USER], "context_management": {"edits": []}}, "context_management"),
    ],
)
async def test_what_has_no_effect_is_named(tmp_path: Path, path: str, body: Any, named: str | None) -> None:
    body = {**body, "max_tokens": 5} if path == MESSAGES else body
    async with running_server(tmp_path) as server:
        answer = await server.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-quire-ignored-fields") == named
    async with running_server(tmp_path, strict_fields=True) as server:
        assert (await server.post(path, body)).status_code == (400 if named else 200)


async def test_a_field_that_the_template_reads_has_an_effect(tmp_path: Path) -> None:
    body = {"messages": [{**USER, "mood": "calm", "odd": 1}], "tools": [{**TOOLS[0], "mode": 1}], "tool_choice": "none"}
    template = "{{ messages[0].mood }}{{ tools | tojson }}{{ messages[0].content }}"
    async with running_server(tmp_path, chat_template=template) as server:
        assert (await server.post(CHAT, body)).headers["x-quire-ignored-fields"] == "messages[0].odd"
    async with running_server(tmp_path, chat_template="{% for m in messages %}{{ m | tojson }}{% endfor %}") as server:
        answer = await server.post(CHAT, {"messages": body["messages"]})
        assert "x-quire-ignored-fields" not in answer.headers


async def test_very_many_unknown_fields_are_refused(tmp_path: Path) -> None:
    part = {**PART, **dict.fromkeys(map(str, range(40_000)), 1)}
    async with running_server(tmp_path) as server:
        answer = await server.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
        assert answer.status_code == 400
        assert "too many fields" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "audio": {"id": "a"}},
    ],
)
async def test_a_field_of_a_message_that_is_not_supported_is_refused(tmp_path: Path, message: dict[str, Any]) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(CHAT, {"messages": [USER, message]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"messages[1].{list(message)[1]}"


@pytest.mark.parametrize("xargs", [[], {"a": {"b": 1}}, {"a": None}, dict.fromkeys(map(str, range(300)), 1)])
async def test_arguments_of_extensions_are_checked(tmp_path: Path, xargs: Any) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(COMPLETIONS, {"prompt": "x", "vllm_xargs": xargs})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("vllm_xargs")


@pytest.mark.parametrize(
    ("field", "complaint"),
    [
        ({"best_of": 2}, "`best_of` is not supported by this server; leave it out, or send 1."),
        ({"modalities": ["audio"]}, '; leave it out, or send ["text"].'),
        ({"functions": [1]}, "`functions` is not supported by this server; leave it out."),
    ],
)
async def test_the_error_of_an_unsupported_field_names_its_default(
    tmp_path: Path, field: dict[str, Any], complaint: str
) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(COMPLETIONS, {"prompt": "x", **field})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in field
    assert answer.json()["error"]["message"].endswith(complaint)


async def test_field_names_cannot_forge_lines_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_server(tmp_path) as server:
        with caplog.at_level(logging.WARNING):
            await server.post(COMPLETIONS, {"prompt": "x", "foo\r\nX: y": 1, "long" * 1000: 1})
    (line,) = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert "foo%0D%0AX%3A y" in line
    assert "\n" not in line
    assert len(line) < 300
