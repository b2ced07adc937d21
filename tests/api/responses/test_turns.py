"""Turns of a response with MCP tools: which tools may be called, the prompt of the next turn, and unusable tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.responses import PATH, ask, prompts
from tests.support.server import until
from tests.support.tool_server import OWN, ROME, WEATHER, call, kinds, serving

OWN_ALONE = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "own"}]}
RAIN_ALONE = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "mcp", "server_label": "weather", "name": "get_weather"}],
}


async def test_a_tool_that_the_choice_leaves_out_is_not_called(tmp_path: Path) -> None:
    async with serving(tmp_path, ROME, "Well.") as (server, core, tools):
        body = await ask(server, "Weather?", tools=[WEATHER, OWN], tool_choice=OWN_ALONE)
    assert tools.calls == []
    assert kinds(body) == ["mcp_list_tools", "mcp_call", "message"]
    assert body["output"][1]["status"] == "failed"
    assert "tool_choice" in body["output"][1]["error"]["message"]
    assert "tool_choice" in prompts(core)[-1]


async def test_nor_is_it_in_later_turns(tmp_path: Path) -> None:
    async with serving(tmp_path, ROME, call("wait"), "Well.") as (server, _, tools):
        body = await ask(server, "Weather?", tools=[WEATHER], tool_choice=RAIN_ALONE)
    assert tools.calls == [("get_weather", {"city": "Rome"})]
    assert [item["status"] for item in body["output"] if item["type"] == "mcp_call"] == ["completed", "failed"]


async def test_what_is_said_behind_a_call_was_said_before_its_result(tmp_path: Path) -> None:
    async with serving(tmp_path, f"I look.{ROME}\nIt is 5 degrees.", "Warm.") as (server, core, _):
        body = await ask(server, "Weather?", tools=[WEATHER])
    assert kinds(body) == ["mcp_list_tools", "message", "mcp_call", "message", "message"]
    said, after = prompts(core)[-1].split("(get_weather)]")
    assert "I look." in said
    assert "It is 5 degrees." in said
    assert after.endswith("[tool:21 degrees in Rome]")


async def test_the_engines_end_ends_a_response_that_waits_for_a_tool(tmp_path: Path) -> None:
    async with serving(tmp_path, call("wait"), "Well.") as (server, _, tools):
        asking = asyncio.create_task(server.post(PATH, {"input": "Weather?", "tools": [WEATHER]}))
        await until(lambda: tools.waiting == 1)
        server.state.models[0].client.fail("the server is shutting down")
        answer = await asking
        await until(lambda: tools.waiting == 0)
    assert answer.status_code == 503
    assert "shutting down" in answer.text


@pytest.mark.parametrize("named", [["far"], None])
async def test_tools_that_cannot_be_written_down_are_not_offered(tmp_path: Path, named: Any) -> None:
    async with serving(tmp_path, "Well.") as (server, _, _):
        answer = await server.post(PATH, {"input": "hi", "tools": [{**WEATHER, "allowed_tools": named}]})
        other = await server.post(PATH, {"input": "hi", "tools": [WEATHER]})
    assert answer.status_code == 424
    assert "'far'" in answer.text
    assert other.status_code == 200


async def test_errors_of_elsewhere_may_be_too_deep(tmp_path: Path) -> None:
    deep: Any = "?"
    for _ in range(300):
        deep = [deep]
    made = {"type": "mcp_call", "id": "mcp_1", "server_label": "weather", "name": "get_weather", "arguments": "{}"}
    async with serving(tmp_path, "Well.") as (server, _, _):
        answer = await server.post(PATH, {"input": [{"role": "user", "content": "hi"}, {**made, "error": deep}]})
    assert answer.status_code == 400


async def test_a_choice_of_servers_that_are_not_there_is_refused(tmp_path: Path) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "nope", "name": "z"}]}
    async with serving(tmp_path, "Well.") as (server, _, _):
        for tool_choice in (choice, {"type": "mcp", "server_label": "nope"}):
            answer = await server.post(PATH, {"input": "hi", "tools": [OWN], "tool_choice": tool_choice})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "tool_choice"
