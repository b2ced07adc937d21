"""MCP tools in requests that are refused: unreachable, not allowed or contradictory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.mcp_server import mcp_server
from tests.support.responses import PATH, ask, output_text
from tests.support.server import running_server, until
from tests.support.tool_server import OWN, WEATHER, serving


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_no_tool_server_is_an_error_at_once(tmp_path: Path, stream: bool) -> None:
    async with mcp_server() as tools:
        options: dict[str, Any] = {"tool_server": f"weather={tools.url}/nothing", "tool_call_parser": "hermes"}
        async with running_server(tmp_path, **options) as server:
            answer = await server.post(PATH, {"input": "hi", "tools": [WEATHER], "stream": stream})
            await until(lambda: server.state.models[0].client.slots_in_use == 0)
    assert (answer.status_code, answer.json()["error"]["param"]) == (424, "tools")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"server_label": "nobody"}, "tools[0].server_label"),
        ({"server_url": "http://169.254.169.254/mcp"}, "tools[0].server_url"),
        ({"require_approval": "always"}, "tools[0].require_approval"),
        ({"require_approval": None}, "tools[0].require_approval"),
        ({"allowed_tools": ["get_weather", "nothing"]}, "tools[0].allowed_tools"),
        ({"allowed_tools": {"names": []}}, None),
        ({"connector_id": "connector_gmail"}, "tools[0].connector_id"),
        ({"headers": {"Host": "elsewhere"}}, "tools[0].headers"),
        ({"headers": {"authorization": "a"}, "authorization": "b"}, "tools[0].authorization"),
        ({"headers": {"x": "a\r\nb: c"}}, None),
        ({"server_label": 1}, "tools[0].server_label"),
    ],
)
async def test_what_cannot_be_granted_is_refused(tmp_path: Path, change: dict[str, Any], param: str | None) -> None:
    async with serving(tmp_path, "Yes.") as (server, _, tools):
        answer = await server.post(PATH, {"input": "hi", "tools": [{**WEATHER, **change}]})
        assert answer.status_code == 400, answer.text
        if param is not None:
            assert answer.json()["error"]["param"] == param
        assert output_text(await ask(server, "hi", tools=[WEATHER])) == "Yes."
        await until(lambda: server.state.models[0].client.slots_in_use == 0)
    assert tools.calls == []


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [WEATHER, {"type": "function", "name": "get_weather"}]},
        {"tools": [WEATHER, WEATHER]},
        {"tools": [WEATHER], "tool_choice": {"type": "mcp", "server_label": "weather", "name": "nothing"}},
        {"tools": [WEATHER], "tool_choice": {"type": "mcp", "server_label": "nobody"}},
        {"tools": [OWN], "tool_choice": {"type": "mcp", "server_label": "weather"}},
        {"input": [{"type": "mcp_call", "id": "x"}]},
        {"input": [{"type": "mcp_list_tools", "server_label": "weather", "tools": 1}]},
    ],
)
async def test_what_does_not_fit_together_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with serving(tmp_path) as (server, _, _):
        answer = await server.post(PATH, {"input": "hi", **fields})
    assert answer.status_code == 400, answer.text
