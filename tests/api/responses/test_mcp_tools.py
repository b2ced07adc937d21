"""Tools of MCP servers in responses: a real server of tools, and a fake core with scripted answers."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.engine.client.protocol import AddRequest
from tests.support.fake_core import FakeCore, says_in_turn
from tests.support.mcp_server import mcp_server
from tests.support.picture_chat import TOKEN, PictureCore, painted, picture_server, picture_tokenizer
from tests.support.responses import PATH, ask, output_text, prompts, stream
from tests.support.server import running_server, until
from tests.support.tokenizer import byte_tokenizer
from tests.support.tool_server import OSLO, OWN, ROME, TEMPLATE, WEATHER, call, kinds, serving


async def test_a_tool_is_called_and_its_result_goes_on(tmp_path: Path) -> None:
    answers = (f"<think>\nHm.\n</think>\n\nI look.{ROME}", "<think>\nSo.\n</think>\n\nIt is warm.")
    async with serving(tmp_path, *answers) as (server, core, tools):
        body = await ask(server, "Weather?", tools=[WEATHER], enable_response_messages=True)
    assert tools.calls == [("get_weather", {"city": "Rome"})]
    assert kinds(body) == ["mcp_list_tools", "reasoning", "message", "mcp_call", "reasoning", "message"]
    assert [message["message"] for message in body["output_messages"]] == list(answers)
    assert [len(message["tokens"]) for message in body["input_messages"]] == [len(prompt) for prompt in prompts(core)]
    listed, _, _, made, _, message = body["output"]
    assert listed["server_label"] == "weather"
    assert [tool["name"] for tool in listed["tools"]] == ["get_weather", "fail", "wait"]
    assert listed["tools"][0]["description"] == "Get the weather of a city."
    assert listed["tools"][0]["input_schema"]["properties"]["city"]["type"] == "string"
    assert listed["tools"][0]["annotations"] == {"readOnlyHint": True}
    assert made["id"].startswith("mcp_")
    assert (made["server_label"], made["name"]) == ("weather", "get_weather")
    assert json.loads(made["arguments"]) == {"city": "Rome"}
    assert (made["output"], made["error"], made["status"]) == ("21 degrees in Rome", None, "completed")
    assert message["content"][0]["text"] == "It is warm."
    before, after = prompts(core)
    assert before.startswith("<get_weather><fail><wait>[user:Weather?]")
    assert "[assistant:I look.(get_weather)][tool:21 degrees in Rome]" in after
    tokens = [len(message.prompt) for message in core.received if isinstance(message, AddRequest)]
    assert body["usage"]["input_tokens"] == sum(tokens)
    assert body["usage"]["output_tokens"] == sum(len(byte_tokenizer().encode(answer).ids) + 1 for answer in answers)
    assert body["status"] == "completed"


async def test_pictures_of_a_result_are_seen(tmp_path: Path) -> None:
    """Also by the next response; a broken one is a result that says so; models without eyes get a text."""
    draws = {**WEATHER, "allowed_tools": ["draw"]}
    said = iter([call("draw"), "It is red.", "Still.", call("draw"), "I see nothing."])
    core = PictureCore(answer=lambda _: [*picture_tokenizer().encode(next(said)).ids, TOKEN["<|im_end|>"]])
    async with mcp_server() as tools:
        flags = {"tool_server": f"weather={tools.url}", "tool_call_parser": "hermes"}
        async with picture_server(tmp_path / "sees", core, **flags) as server:
            tools.picture = painted("red")
            body = await ask(server, "Draw.", tools=[draws])
            made = body["output"][1]
            assert made["type"] == "mcp_call"
            assert [part["type"] for part in made["content"]] == ["input_text", "input_image"]
            again = await ask(server, "And now?", tools=[draws], previous_response_id=body["id"])
            assert output_text(again) == "Still."
            assert [len(items) for items in core.items] == [0, 1, 1]
            assert "tool\nLook:<pic>" in core.prompts[1]
            tools.picture = b"no picture"
            broken = await ask(server, "Draw again.", tools=[draws])
            assert output_text(broken) == "I see nothing."
            assert "Its pictures cannot be read" in core.prompts[-1]
    async with serving(tmp_path / "blind", call("draw"), "Well.") as (server, _, tools):
        tools.picture = painted("red")
        made = (await ask(server, "Draw.", tools=[draws]))["output"][1]
        assert made["output"] == "Look:\n[content of type image cannot be shown]"
        assert "content" not in made


async def test_events_come_in_their_order(tmp_path: Path) -> None:
    async with serving(tmp_path, ROME, "Warm.") as (server, _, _):
        events = await stream(server, "Weather?", tools=[WEATHER])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    assert [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]] == [
        "created", "in_progress",
        "output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done",
        "output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done",
        "mcp_call.completed", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    output = events[-1]["response"]["output"]
    for place, item in enumerate(output):
        item_events = [event for event in events if event.get("output_index") == place]
        assert {event["item_id"] for event in item_events if "item_id" in event} == {item["id"]}
        assert item_events[-1]["item"] == item
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert added[0]["tools"] == []
    assert (added[1]["arguments"], added[1]["output"], added[1]["status"]) == ("", None, "in_progress")
    deltas = [event["delta"] for event in events if event["type"] == "response.mcp_call_arguments.delta"]
    assert "".join(deltas) == output[1]["arguments"]


async def test_openais_client_reads_them(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, ROME, call("fail"), "Warm.") as (server, _, _),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        body: Any = {"model": "fake", "input": "Weather?", "tools": [WEATHER]}
        async with client.responses.stream(**body) as events:
            seen = [event.type async for event in events if "mcp" in event.type and "delta" not in event.type]
            final = await events.get_final_response()
        again = await client.responses.retrieve(final.id)
    assert seen == [
        "response.mcp_list_tools.in_progress", "response.mcp_list_tools.completed",
        "response.mcp_call.in_progress", "response.mcp_call_arguments.done", "response.mcp_call.completed",
        "response.mcp_call.in_progress", "response.mcp_call_arguments.done", "response.mcp_call.failed",
    ]  # fmt: skip
    assert final.output_text == "Warm."
    made, failed = (item for item in again.output if item.type == "mcp_call")
    assert made.output == "21 degrees in Rome"
    assert failed.error is not None
    assert failed.error.type == "mcp_tool_execution_error"


async def test_several_calls_of_one_turn(tmp_path: Path) -> None:
    async with serving(tmp_path, f"{ROME}\n{OSLO}", "Both.") as (server, core, tools):
        body = await ask(server, "Weather?", tools=[WEATHER])
    assert sorted(arguments["city"] for _, arguments in tools.calls) == ["Oslo", "Rome"]
    assert [item["output"] for item in body["output"][1:3]] == ["21 degrees in Rome", "21 degrees in Oslo"]
    assert "[tool:21 degrees in Rome]" in prompts(core)[1]
    assert "[tool:21 degrees in Oslo]" in prompts(core)[1]


async def test_one_call_at_a_time(tmp_path: Path) -> None:
    async with serving(tmp_path, f"{ROME}\n{OSLO}", "One.") as (server, _, tools):
        await ask(server, "Weather?", tools=[WEATHER], parallel_tool_calls=False)
    assert [arguments["city"] for _, arguments in tools.calls] == ["Rome"]


async def test_a_call_of_the_clients_ends_the_response(tmp_path: Path) -> None:
    async with serving(tmp_path, f"{call('own')}\n{ROME}", "Done.") as (server, core, tools):
        first = await ask(server, "Weather?", tools=[WEATHER, OWN])
        assert kinds(first) == ["mcp_list_tools", "function_call", "mcp_call"]
        assert len(tools.calls) == 1
        assert len(prompts(core)) == 1
        result = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "mine"}
        second = await ask(server, [result], tools=[WEATHER, OWN], previous_response_id=first["id"])
    assert output_text(second) == "Done."
    assert "[assistant:(own)(get_weather)][tool:21 degrees in Rome][tool:mine]" in prompts(core)[1]


async def test_a_conversation_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path, ROME, "Warm.", "Still.", "Again.", "Else.") as (server, core, _):
        first = await ask(server, "Weather?", tools=[WEATHER])
        second = await ask(server, "And now?", tools=[WEATHER], previous_response_id=first["id"])
        assert kinds(second) == ["message"]  # the list is known
        fewer = {**WEATHER, "allowed_tools": {"read_only": True}}
        third = await ask(server, "And now?", tools=[fewer], previous_response_id=second["id"])
        assert kinds(third) == ["mcp_list_tools", "message"]  # it is another one
        assert [tool["name"] for tool in third["output"][0]["tools"]] == ["get_weather"]
        stored = (await server.http.get(f"{PATH}/{second['id']}/input_items", params={"order": "asc"})).json()
        items = [{"role": "user", "content": "Weather?"}, *first["output"], {"role": "user", "content": "So?"}]
        fourth = await ask(server, items, tools=[WEATHER], store=False)
    assert kinds(fourth) == ["message"]
    assert [item["type"] for item in stored["data"]] == ["message", "mcp_list_tools", "mcp_call", "message", "message"]
    history = "[user:Weather?][assistant:(get_weather)][tool:21 degrees in Rome][assistant:Warm.]"
    assert history in prompts(core)[2]
    assert history in prompts(core)[4]


async def test_calls_beyond_the_limit_are_not_made(tmp_path: Path) -> None:
    async with serving(tmp_path, f"{ROME}\n{OSLO}", OSLO, "Never said.") as (server, core, tools):
        body = await ask(server, "Weather?", tools=[WEATHER], max_tool_calls=1)
    assert len(tools.calls) == 1
    assert kinds(body) == ["mcp_list_tools", "mcp_call", "mcp_call", "mcp_call"]
    assert [item["status"] for item in body["output"][1:]] == ["completed", "failed", "failed"]
    assert "max_tool_calls" in body["output"][2]["error"]["message"]
    assert body["status"] == "completed"
    assert "max_tool_calls" in prompts(core)[1]  # the model may answer with what it has
    assert len(prompts(core)) == 2


async def test_failed_calls_are_reported_to_the_model(tmp_path: Path) -> None:
    broken = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ro\n</tool_call>'
    answers = (call("fail"), call("get_weather", town=1), broken, "Sorry.")
    async with serving(tmp_path, *answers) as (server, core, tools):
        body = await ask(server, "Weather?", tools=[WEATHER])
    assert tools.calls == [("fail", {})]
    calls = [item for item in body["output"] if item["type"] == "mcp_call"]
    assert {item["status"] for item in calls} == {"failed"}
    assert [item["error"]["type"] for item in calls[:2]] == ["mcp_tool_execution_error"] * 2
    assert "no such luck" in calls[0]["error"]["content"][0]["text"]
    assert "no such luck" in prompts(core)[1]
    assert output_text(body) == "Sorry."


async def test_a_server_that_stops_and_comes_back(tmp_path: Path) -> None:
    core = FakeCore(answer=says_in_turn(ROME, "Sorry.", ROME, "Warm."))
    core.hold.set()
    async with AsyncExitStack() as stack:
        tools = await stack.enter_async_context(mcp_server())
        options: dict[str, Any] = {"tool_server": f"weather={tools.url}", "tool_call_parser": "hermes"}
        async with running_server(tmp_path, core, **options) as server:
            asking = asyncio.create_task(ask(server, "Weather?", tools=[WEATHER]))
            await until(lambda: core.active)
            await stack.aclose()  # listed, and gone
            core.hold.clear()
            core.allow(1)
            first = await asking
            refused = await server.post(PATH, {"input": "hi", "tools": [WEATHER]})
            port = httpx.URL(tools.url).port or 0
            async with mcp_server(port=port) as tools:
                second = await ask(server, "Weather?", tools=[WEATHER])
    assert first["output"][1]["error"]["type"] == "http_error"
    assert output_text(first) == "Sorry."
    assert refused.status_code == 424
    assert "'weather'" in refused.json()["error"]["message"]
    assert second["output"][1]["output"] == "21 degrees in Rome"


@pytest.mark.parametrize("way", ["leave", "cancel", "timeout"])
async def test_a_response_that_ends_ends_its_calls(tmp_path: Path, way: str) -> None:
    async with serving(tmp_path, call("wait"), "So.") as (server, _, tools):
        request: dict[str, Any] = {"input": "hi", "tools": [WEATHER]}
        if way == "cancel":
            body = (await server.post(PATH, {**request, "background": True})).json()
            await until(lambda: tools.waiting)
            path = f"{PATH}/{body['id']}"
            assert (await server.http.get(path)).json()["status"] == "in_progress"
            assert (await server.http.post(f"{path}/cancel")).json()["status"] == "cancelled"
        elif way == "timeout":
            late = await server.post(PATH, {**request, "timeout": 2})
            assert late.status_code == 408
            assert "after 2 seconds" in late.json()["error"]["message"]
        else:
            asking = asyncio.create_task(server.post(PATH, request))
            await until(lambda: tools.waiting)
            asking.cancel()
        await until(lambda: not tools.waiting)
        await until(lambda: not server.state.models[0].client.slots_in_use)
        await until(lambda: tools.calls == [("wait", {})])


async def test_a_call_that_takes_too_long_fails(tmp_path: Path) -> None:
    async with serving(tmp_path, call("wait"), "Sorry.", tool_timeout=2) as (server, _, tools):
        body = await ask(server, "hi", tools=[WEATHER])
        await until(lambda: not tools.waiting)
    assert body["output"][1]["error"] == {
        "type": "http_error",
        "code": 504,
        "message": "The tool server did not answer within 2 seconds.",
    }
    assert output_text(body) == "Sorry."


async def test_in_the_background(tmp_path: Path) -> None:
    async with serving(tmp_path, ROME, "Warm.") as (server, _, _):
        body = await ask(server, "Weather?", tools=[WEATHER], background=True)
        again = await server.http.get(f"{PATH}/{body['id']}", params={"stream": True})
        whole = (await server.http.get(f"{PATH}/{body['id']}")).json()
    assert "event: response.mcp_call.completed" in again.text
    assert kinds(whole) == ["mcp_list_tools", "mcp_call", "message"]


async def test_output_tokens_are_of_the_whole_response(tmp_path: Path) -> None:
    room = len(ROME) + 1
    async with serving(tmp_path, ROME, "Warm.", ROME, ROME) as (server, core, tools):
        short = await ask(server, "hi", tools=[WEATHER], max_output_tokens=room + 2, min_tokens=5)
        none = await ask(server, "hi", tools=[WEATHER], max_output_tokens=room)
        cut = await ask(server, "hi", tools=[WEATHER], max_output_tokens=room - 20)
    assert (output_text(short), short["usage"]["output_tokens"]) == ("Wa", room + 2)
    assert kinds(none) == kinds(cut) == ["mcp_list_tools", "mcp_call"]
    assert [item["output"][1]["status"] for item in (none, cut)] == ["completed", "incomplete"]
    assert {item["status"] for item in (short, none, cut)} == {"incomplete"}
    assert short["incomplete_details"] == {"reason": "max_output_tokens"}
    assert len(tools.calls) == 2
    assert len(prompts(core)) == 4


async def test_a_context_that_is_full_ends_the_response(tmp_path: Path) -> None:
    long, template = call("get_weather", city="x" * 180), TEMPLATE.replace("c.function.name", "c.function.arguments")
    async with serving(tmp_path, long, "Never said.", chat_template=template) as (server, core, _):
        body = await ask(server, "y" * 150, tools=[WEATHER])
    assert (body["status"], kinds(body)) == ("incomplete", ["mcp_list_tools", "mcp_call"])
    assert len(prompts(core)) == 1


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "mcp", "server_label": "weather", "name": "get_weather"},
        {"type": "mcp", "server_label": "weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "mcp", "server_label": "weather", "name": "get_weather"}],
        },
    ],
)
async def test_only_the_first_turn_is_forced_to_call(tmp_path: Path, choice: Any) -> None:
    async with serving(tmp_path, ROME, "Warm.") as (server, core, _):
        body = await ask(server, "Weather?", tools=[WEATHER], tool_choice=choice)
    first, second = (message for message in core.received if isinstance(message, AddRequest))
    assert first.sampling_params.grammar
    assert not second.sampling_params.grammar
    assert output_text(body) == "Warm."
    assert body["tool_choice"] == choice


async def test_headers_reach_the_server_and_nobody_else(tmp_path: Path) -> None:
    tool = {**WEATHER, "headers": {"x-key": "secret-1"}, "authorization": "secret-2"}
    async with serving(tmp_path, ROME, "Warm.") as (server, _, tools):
        answer = await server.post(PATH, {"input": "hi", "tools": [tool]})
        stored = await server.http.get(f"{PATH}/{answer.json()['id']}")
    assert {headers["x-key"] for headers in tools.headers} == {"secret-1"}
    assert {headers["authorization"] for headers in tools.headers} == {"Bearer secret-2"}
    assert "secret" not in answer.text + stored.text
    assert answer.json()["tools"] == [WEATHER]


async def test_a_configured_url_may_be_named(tmp_path: Path) -> None:
    async with serving(tmp_path, ROME, "Warm.") as (server, _, tools):
        named = {**WEATHER, "server_url": tools.url, "server_label": "mine", "server_description": "of mine"}
        answer = await server.post(PATH, {"input": "hi", "tools": [named]})
    assert answer.json()["output"][1]["server_label"] == "mine"
    assert "server_description" in answer.headers["x-quire-ignored-fields"]


async def test_the_error_of_an_unknown_server_names_those_that_are_allowed(tmp_path: Path) -> None:
    async with serving(tmp_path, ROME, "Warm.") as (server, _, _):
        answer = await server.post(PATH, {"input": "hi", "tools": [{**WEATHER, "server_label": "news"}]})
    assert answer.status_code == 400
    assert "There is no MCP server 'news' (this server allows weather)" in answer.json()["error"]["message"]


async def test_the_older_transport(tmp_path: Path) -> None:
    core = FakeCore(answer=says_in_turn(ROME, "Warm."))
    async with mcp_server(old=True) as tools:
        options: dict[str, Any] = {"tool_server": tools.url, "tool_call_parser": "hermes"}
        async with running_server(tmp_path, core, **options) as server:
            body = await ask(server, "hi", tools=[{**WEATHER, "server_label": "127.0.0.1"}])
    assert body["output"][1]["output"] == "21 degrees in Rome"


async def test_calls_of_elsewhere_are_read(tmp_path: Path) -> None:
    call = {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "hi"},
        call,
        {**call, "id": "mcp_2", "error": "old words"},
        {**call, "id": "mcp_3", "error": {"type": "http_error", "code": 500, "message": "new words"}},
        {**call, "id": "mcp_4", "error": {"type": "odd", "content": [1]}},
    ]
    async with serving(tmp_path, "Yes.") as (server, core, _):
        await ask(server, items)
    for text in ("There is no result of this call.", "Error: old words", "Error: new words", "Error: [1]"):
        assert f"[tool:{text}]" in prompts(core)[0]
