"""Undeclared and unused request fields."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import running_server

CHAT = "/v1/chat/completions"
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
    ],
)
async def test_what_has_no_effect_is_named(tmp_path: Path, path: str, body: Any, named: str | None) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-quire-ignored-fields") == named
    async with running_server(tmp_path, strict_fields=True) as server:
        assert (await server.post(path, body)).status_code == (400 if named else 200)


COMPLETIONS = "/v1/completions"


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
