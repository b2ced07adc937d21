"""Messages in the shape that templates expect."""

from __future__ import annotations

from typing import Any

import pytest

from quire.multimodal.errors import PromptError
from quire.multimodal.messages import normalise


def test_contents_become_text_or_parts() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "refusal", "refusal": "c"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    assert [m["content"] for m in normalise(messages, as_parts=False)] == ["a", "b\nc", ""]
    parts = [m["content"] for m in normalise(messages, as_parts=True)]
    assert parts == [[{"type": "text", "text": "a"}], [{"type": "text", "text": t} for t in "bc"], []]
    assert "tool_calls" not in normalise(messages, as_parts=False)[2]


def test_reasoning_is_there_under_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        (message,) = normalise([{"role": "assistant", "content": "x", name: "why"}], as_parts=False)
        assert message["reasoning"] == message["reasoning_content"] == "why"


def test_tool_arguments_become_objects() -> None:
    long = 10**30
    for given, expected in (
        ('{"a": 1}', {"a": 1}),
        (f"[{long}]", [long]),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, None),
    ):
        call = {"id": "1", "function": {"name": "f", "arguments": given}}
        (message,) = normalise([{"role": "assistant", "tool_calls": [call]}], as_parts=False)
        assert message["tool_calls"][0]["function"].get("arguments") == expected
    with pytest.raises(PromptError, match="JSON"):
        normalise([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], as_parts=False)


def test_the_message_at_fault_is_named() -> None:
    with pytest.raises(PromptError) as refused:
        normalise(
            [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "video_url"}]}], as_parts=False
        )
    assert refused.value.param == "messages[1].content[0]"
