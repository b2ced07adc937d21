"""A server whose model calls tools of an MCP server, in scripted answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.fake_core import FakeCore, says_in_turn
from tests.support.mcp_server import Tools, mcp_server
from tests.support.server import Server, running_server

TEMPLATE = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}]{% endfor %}"
)

WEATHER: dict[str, Any] = {
    "type": "mcp",
    "server_label": "weather",
    "require_approval": "never",
    "allowed_tools": ["get_weather", "fail", "wait"],
}

OWN = {"type": "function", "name": "own", "parameters": {"type": "object", "properties": {}}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ROME = call("get_weather", city="Rome")

OSLO = call("get_weather", city="Oslo")


@asynccontextmanager
async def serving(folder: Path, *answers: str, **settings: Any) -> AsyncIterator[tuple[Server, FakeCore, Tools]]:
    core = FakeCore(answer=says_in_turn(*answers))
    defaults: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "chat_template": TEMPLATE}
    async with (
        mcp_server() as tools,
        running_server(folder, core, tool_server=f"weather={tools.url}", **defaults | settings) as server,
    ):
        yield server, core, tools


def kinds(body: dict[str, Any]) -> list[str]:
    return [item["type"] for item in body["output"]]
