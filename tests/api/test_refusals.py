"""A refusal says what is wrong with which field, in words for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.server import running_server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (COMPLETIONS, {"prompt": 5}, "prompt", "prompt: Input should be a valid string or a valid list"),
        (COMPLETIONS, {}, "prompt", "prompt: Field required"),
        (COMPLETIONS, {"prompt": "x", "stop": [1]}, "stop", "stop: Input should be a valid string; stop.0: Input "),
        (CHAT, {"messages": [{**USER, "content": 5}]}, "messages.0.content", "messages.0.content: Input should be a "),
        (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role", "messages.0.role: Field required"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens: `max_tokens` must be at least 1"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {}}, "stream_options", "stream_options: Stream options can"),
        (COMPLETIONS, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "prompt_logprobs: "),
        (CHAT, {"messages": [USER], "top_logprobs": 2}, "top_logprobs", "top_logprobs: when using"),
        (
            CHAT,
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "add_generation_prompt: Cannot set both",
        ),
        ("/tokenize", {}, "prompt", "prompt: Give either"),
        (COMPLETIONS, [], None, "body: Input should be"),
        (
            COMPLETIONS,
            {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(1000)), "a")},
            "logit_bias.0",
            "logit_bias.0: Input should be a valid number",
        ),
    ],
)
async def test_the_field_at_fault_is_named(
    tmp_path: Path, path: str, body: Any, param: str | None, message: str
) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(path, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert error["message"].startswith(message)
        assert "Value error" not in error["message"]
        assert error["message"].count(";") <= 10


async def test_broken_json_blames_no_field(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        headers = {"content-type": "application/json"}
        answer = await server.http.post(COMPLETIONS, content=b'{"prompt": "x", "max_tokens":}', headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, None)
        assert error["message"].startswith("body: JSON decode error: ")


async def test_what_is_too_much_for_the_whole_server_is_named(tmp_path: Path) -> None:
    async with running_server(tmp_path, capacity=3) as server:
        for body, param in (({"prompt": ["x"] * 4}, "prompt"), ({"prompt": "x", "n": 4}, "n")):
            answer = await server.post(COMPLETIONS, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        answer = await server.post(CHAT, {"messages": [USER], "n": 4})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


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
    ],
)
async def test_what_has_no_effect_is_named(tmp_path: Path, path: str, body: Any, named: str | None) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-quire-ignored-fields") == named
    async with running_server(tmp_path, strict_fields=True) as server:
        assert (await server.post(path, body)).status_code == (400 if named else 200)
