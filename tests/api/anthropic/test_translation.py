"""Answers as messages."""

from __future__ import annotations

import json

import pytest

from quire.api.anthropic.translation import content_blocks
from quire.parsing.tools.calls import CallDelta, Parsed
from quire.protocol.anthropic import MessagesResponse, MessagesUsage


@pytest.mark.parametrize("depth", [150, 260, 1000, 3000])
def test_a_call_with_deep_arguments_can_be_serialized(depth: int) -> None:
    arguments = '{"a":' + "[" * depth + "]" * depth + "}"
    content = content_blocks(Parsed([CallDelta(0, "id", "f", arguments)]), thinking=False)
    usage = MessagesUsage(input_tokens=1, output_tokens=1)
    message = MessagesResponse(id="a", model="m", content=content, stop_reason="tool_use", usage=usage)
    (block,) = json.loads(message.model_dump_json())["content"]
    assert block["input"] == (json.loads(arguments) if depth < 200 else {})
