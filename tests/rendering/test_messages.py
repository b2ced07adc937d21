"""Messages in the shape that templates expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.multimodal.errors import PromptError
from quire.rendering.messages import normalize, with_arguments
from tests.support.server import running_server


def test_contents_become_text_or_parts() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "refusal", "refusal": "c"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    assert [m["content"] for m in normalize(messages, as_parts=False)] == ["a", "b\nc", ""]
    parts = [m["content"] for m in normalize(messages, as_parts=True)]
    assert parts == [[{"type": "text", "text": "a"}], [{"type": "text", "text": t} for t in "bc"], []]
    assert "tool_calls" not in normalize(messages, as_parts=False)[2]


def test_reasoning_is_there_under_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        (message,) = normalize([{"role": "assistant", "content": "x", name: "why"}], as_parts=False)
        assert message["reasoning"] == message["reasoning_content"] == "why"


def test_tool_arguments_become_objects() -> None:
    long = 10**30
    for arguments, expected in (
        ('{"a": 1}', {"a": 1}),
        (f"[{long}]", [long]),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, None),
    ):
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        (message,) = with_arguments([{"role": "assistant", "tool_calls": [call]}])
        assert message["tool_calls"][0]["function"].get("arguments") == expected
    with pytest.raises(PromptError, match="JSON"):
        with_arguments([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}])


def test_the_message_at_fault_is_named() -> None:
    with pytest.raises(PromptError) as refused:
        normalize(
            [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "video_url"}]}], as_parts=False
        )
    assert refused.value.param == "messages[1].content[0]"


CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]
DEEP = "[" * 100_000
HALF = r'"\ud800"'


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"function": "abc"}]},
        {"role": "assistant", "tool_calls": [{"function": ["a"]}]},
        {"role": "assistant", "tool_calls": [{"function": 5}]},
        {"role": "assistant", "tool_calls": ["a"]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": f'{{"a": {HALF}}}'}}]},
        {"role": "user", "content": [{"type": []}]},
        {"role": "user", "content": [{"type": {}}]},
    ],
)
async def test_messages_that_are_none_are_refused(tmp_path: Path, message: dict[str, Any]) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ (m.tool_calls or []) | tojson }}{% endfor %}"
    async with running_server(tmp_path, chat_template=template) as server:
        answer = await server.post(CHAT, {"messages": [*HI, message]})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("messages[1]")
