"""Requests to /v1/responses and what comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.engine.client.protocol import AddRequest
from tests.support.fake_core import FakeCore, says
from tests.support.server import Server, running_server
from tests.support.tokenizer import byte_tokenizer

PATH = "/v1/responses"
TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"type": "web_search"},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
REASONING_AND_CALL = f"<think>\nRome, then.\n</think>\n\nLet me see.\n{CALL}"


async def ask(server: Server, input_items: Any = "hi", **fields: Any) -> dict[str, Any]:
    answer = await server.post(PATH, {"input": input_items, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def events_in(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def stream(server: Server, input_items: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
    answer = await server.post(PATH, {"input": input_items, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return events_in(answer.text)


def output_text(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def prompts(core: FakeCore) -> list[str]:
    added = [message for message in core.received if isinstance(message, AddRequest)]
    return [byte_tokenizer().decode(message.prompt.tolist(), skip_special_tokens=False) for message in added]


def answers_with(text: str = REASONING_AND_CALL) -> FakeCore:
    return FakeCore(answer=says(text))


def reasoning_server(folder: Path, *cores: FakeCore, **settings: Any) -> Any:
    return running_server(folder, *cores, tool_call_parser="hermes", reasoning_parser="qwen3", **settings)
