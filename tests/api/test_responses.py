"""The Responses API over a core without a model: items, events, memory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire.api.answers.tools.calls import Parsed
from quire.api.responses.store import ResponseStore, Stored
from quire.api.responses.translation import sealed
from quire.api.responses.writer import ItemWriter
from quire.engine.wire.protocol import AddRequest
from tests.support.fake_core import FakeCore, says
from tests.support.server import Server, running_server, until
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
THOUGHTFUL = f"<think>\nRome, then.\n</think>\n\nLet me see.\n{CALL}"


async def ask(server: Server, given: Any = "hi", **fields: Any) -> dict[str, Any]:
    answer = await server.post(PATH, {"input": given, **fields})
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


async def stream(server: Server, given: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
    answer = await server.post(PATH, {"input": given, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return events_in(answer.text)


def said(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def prompts(core: FakeCore) -> list[str]:
    added = [message for message in core.received if isinstance(message, AddRequest)]
    return [byte_tokenizer().decode(message.prompt.tolist(), skip_special_tokens=False) for message in added]


def calling(text: str = THOUGHTFUL) -> FakeCore:
    return FakeCore(answer=says(text))


def thinking(folder: Path, core: FakeCore, **settings: Any) -> Any:
    return running_server(folder, core, tool_call_parser="hermes", reasoning_parser="qwen3", **settings)


async def test_an_answer_is_a_message(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = await ask(server, "hello", metadata={"a": "b"}, temperature=0.5, user="me")
    assert body["object"] == "response"
    assert body["id"].startswith("resp_")
    assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
    (message,) = body["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert "HELLO" in said(body)
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]
    assert (body["metadata"], body["temperature"], body["user"]) == ({"a": "b"}, 0.5, "me")
    assert body["text"] == {"verbosity": "medium", "format": {"type": "text"}}


async def test_thoughts_and_calls_are_items(tmp_path: Path) -> None:
    async with thinking(tmp_path, calling()) as server:
        body = await ask(server, tools=TOOLS)
        hidden = await ask(server, tools=TOOLS, include_reasoning=False)
    thought, message, call = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Rome, then."}]
    assert message["content"][0]["text"] == "Let me see."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", {"city": "Rome"})
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert [item["type"] for item in hidden["output"]] == ["message", "function_call"]


async def test_tools_of_others_are_left_out_by_name(tmp_path: Path) -> None:
    async with thinking(tmp_path, calling()) as server:
        answer = await server.post(PATH, {"input": "hi", "tools": TOOLS})
        refused = await server.post(PATH, {"input": "hi", "tools": TOOLS[1:], "tool_choice": "required"})
    assert "tools.1" in answer.headers["x-quire-ignored-fields"]
    assert "web_search" in answer.headers["x-quire-ignored-fields"]
    assert refused.status_code == 400


async def test_events_tell_the_same_as_the_whole(tmp_path: Path) -> None:
    async with thinking(tmp_path, calling()) as server:
        events = await stream(server, tools=TOOLS)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[0]["response"]["output"] == []
    whole = events[-1]["response"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["item"]["status"] for event in added] == ["in_progress"] * 3
    assert added[0]["item"]["content"] == added[1]["item"]["content"] == []
    assert added[2]["item"]["arguments"] == ""
    for place, item in enumerate(whole["output"]):
        own = [event for event in events if event.get("output_index") == place]
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert own[-1]["item"] == item


async def test_answers_that_break_off_are_incomplete(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = await ask(server, "hello", max_output_tokens=3)
        events = await stream(server, "hello", max_output_tokens=3)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


async def test_log_probabilities_come_with_the_text(tmp_path: Path) -> None:
    async with thinking(tmp_path, calling("<think>\nHm\n</think>\n\nabc")) as server:
        fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        body = await ask(server, **fields)
        events = await stream(server, **fields)
    told = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    assert body["output"][1]["content"][0]["logprobs"] == told
    assert "".join(one["token"] for one in told).strip() == "abc"


@pytest.mark.parametrize("size", [1, 2, 5])
def test_log_probabilities_do_not_depend_on_how_tokens_are_grouped(size: int) -> None:
    tokens = [("\n\n", ""), ("a", "a"), ("b", "b"), ("c", "c"), ("<end>", "")]
    writer = ItemWriter(reasoning=True, seal=False)
    for start in range(0, len(tokens), size):
        group = tokens[start : start + size]
        entries = [{"token": token, "bytes": list(token.encode())} for token, _ in group]
        parsed = Parsed()
        parsed.say("".join(text for _, text in group))
        list(writer.write(parsed, entries))
    list(writer.end("completed"))
    (part,) = writer.items[0]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["\n\n", "a", "b", "c"]


async def test_nothing_of_an_event_comes_before_it(tmp_path: Path) -> None:
    """A stream that is told again has the same events, though what they told of has grown since."""
    async with thinking(tmp_path, calling()) as server:
        fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        live = await stream(server, **fields)
        again = await server.http.get(f"{PATH}/{live[0]['response']['id']}?stream=true")
    assert events_in(again.text) == live


async def test_nothing_can_be_left_out_of_no_input(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(PATH, {"input": [], "instructions": "x" * 5000, "truncation": "auto"})
    assert answer.status_code == 400


async def test_stored_responses_can_be_had_again(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = await ask(server)
        assert (await server.http.get(f"{PATH}/{body['id']}")).json() == body
        again = await server.http.get(f"{PATH}/{body['id']}", params={"stream": True})
        assert again.status_code == 400  # its events were not kept
        assert (await server.http.delete(f"{PATH}/{body['id']}")).json()["deleted"] is True
        for answer in (await server.http.get(f"{PATH}/{body['id']}"), await server.http.delete(f"{PATH}/{body['id']}")):
            assert answer.status_code == 404
            assert "not found" in answer.json()["error"]["message"]
        forgotten = await ask(server, store=False)
        assert (await server.http.get(f"{PATH}/{forgotten['id']}")).status_code == 404


async def test_streams_can_be_taken_up_again(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        events = await stream(server, "hello")
        path = f"{PATH}/{events[0]['response']['id']}"
        for after in (None, 0, 3, len(events) - 1):
            params: Any = {"stream": True} if after is None else {"stream": True, "starting_after": after}
            answer = await server.http.get(path, params=params)
            assert events_in(answer.text) == events[0 if after is None else after + 1 :]


async def test_a_conversation_goes_on_where_it_was(tmp_path: Path) -> None:
    core = calling()
    async with thinking(tmp_path, core) as server:
        first = await ask(server, "Where is it warm?", tools=TOOLS, instructions="Be brief.")
        result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "25 degrees"}
        second = await ask(server, [result], previous_response_id=first["id"], tools=TOOLS)
        items = (await server.http.get(f"{PATH}/{second['id']}/input_items", params={"order": "asc"})).json()
    before, after = prompts(core)
    assert "Be brief." in before
    assert "Be brief." not in after  # instructions are of one request alone
    for text in ("Where is it warm?", "Let me see.", "25 degrees"):
        assert text in after
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert [item["type"] for item in items["data"]] == kinds
    assert len({item["id"] for item in items["data"]}) == len(kinds)


async def test_a_conversation_outlives_the_server(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'kept.db'}"
    async with running_server(tmp_path, response_store=url) as server:
        first = await ask(server, "one")
    core = FakeCore()
    async with running_server(tmp_path, core, response_store=url) as server:
        second = await ask(server, "two", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
    assert "one" in prompts(core)[0]
    assert "ONE" in prompts(core)[0]


async def test_responses_expire(tmp_path: Path) -> None:
    async with running_server(tmp_path, response_ttl=1e-6) as server:
        body = await ask(server)
        assert (await server.http.get(f"{PATH}/{body['id']}")).status_code == 404


async def test_pages_of_input(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": str(number), "id": f"m{number}"} for number in range(5)]
    async with running_server(tmp_path) as server:
        body = await ask(server, turns)
        path = f"{PATH}/{body['id']}/input_items"
        page = (await server.http.get(path, params={"limit": 2})).json()
        assert [item["id"] for item in page["data"]] == ["m4", "m3"]
        assert (page["first_id"], page["last_id"], page["has_more"]) == ("m4", "m3", True)
        page = (await server.http.get(path, params={"limit": 4, "after": "m3"})).json()
        assert [item["id"] for item in page["data"]] == ["m2", "m1", "m0"]
        assert page["has_more"] is False
        assert (await server.http.get(path, params={"after": "nowhere"})).status_code == 400


async def test_responses_in_the_background(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        body = await ask(server, "hello", background=True)
        assert body["status"] in ("queued", "in_progress")
        path = f"{PATH}/{body['id']}"
        await until(lambda: core.active)
        core.allow(2)
        following = asyncio.create_task(server.http.get(path, params={"stream": True}))
        assert (await server.http.get(path)).json()["status"] == "in_progress"
        refused = await server.post(PATH, {"input": "more", "previous_response_id": body["id"]})
        assert refused.status_code == 400
        core.hold.clear()
        core.allow(1)
        events = events_in((await following).text)
        whole = (await server.http.get(path)).json()
        assert whole == events[-1]["response"]
        assert whole["status"] == "completed"
        assert "HELLO" in said(whole)
        late = await server.http.post(f"{path}/cancel")
        assert late.status_code == 400


async def test_responses_in_the_background_can_be_cancelled(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        body = await ask(server, "hello", background=True)
        path = f"{PATH}/{body['id']}"
        await until(lambda: core.active)
        assert (await server.http.post(f"{path}/cancel")).json()["status"] == "cancelled"
        core.allow(1)
        await until(lambda: not core.active)
        assert (await server.http.get(path)).json()["status"] == "cancelled"
        assert (await server.http.post(f"{path}/cancel")).json()["status"] == "cancelled"
        at_once = await ask(server, "hello", background=True)
        assert (await server.http.delete(f"{PATH}/{at_once['id']}")).status_code == 200
        core.hold.clear()
        core.allow(1)
        foreground = await ask(server)
        assert (await server.http.post(f"{PATH}/{foreground['id']}/cancel")).status_code == 400


async def test_what_breaks_off_is_kept_as_far_as_it_went(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        answer = await server.post(PATH, {"input": "hello", "background": True})
        path = f"{PATH}/{answer.json()['id']}"
        await until(lambda: core.active)
        following = server.http.stream("GET", path, params={"stream": True})
        async with following as events:
            core.allow(20)
            async for line in events.aiter_lines():
                if line == "event: response.output_text.delta":
                    break
        (message,) = (await server.http.post(f"{path}/cancel")).json()["output"]
    assert message["status"] == "incomplete"
    assert message["content"][0]["text"]


async def test_what_a_dead_server_left_has_failed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'kept.db'}"
    async with running_server(tmp_path, response_store=url) as server:
        body = await ask(server)
        left = {**body, "status": "in_progress", "background": True}
        await ResponseStore(url, 0).save(Stored(response=left, items=[], lease=1.0))
        found = (await server.http.get(f"{PATH}/{body['id']}")).json()
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")


async def test_reasoning_that_the_client_keeps(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}:{{ m.reasoning or '' }}:{{ m.content or '' }}]{% endfor %}"
    core = calling("<think>\nRome, then.\n</think>\n\nYes")
    async with thinking(tmp_path, core, chat_template=template) as server:
        body = await ask(server, store=False, include=["reasoning.encrypted_content"])
        sealed = {**body["output"][0], "content": []}
        await ask(
            server, [{"role": "user", "content": "hi"}, sealed, body["output"][1], {"role": "user", "content": "so"}]
        )
        foreign = {**sealed, "encrypted_content": "gAAAAA"}
        refused = await server.post(PATH, {"input": [foreign]})
    assert "[assistant:Rome, then.:Yes]" in prompts(core)[1]
    assert refused.status_code == 400


async def test_old_turns_are_dropped_to_fit(tmp_path: Path) -> None:
    turns: list[Any] = [{"role": "developer", "content": "Rules."}]
    turns += [{"role": "user", "content": f"<{number}>" + "x" * 60} for number in range(12)]
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        refused = await server.post(PATH, {"input": turns, "max_output_tokens": 20})
        assert refused.status_code == 400
        await ask(server, turns, max_output_tokens=20, truncation="auto")
    assert "Rules." in prompts(core)[0]
    assert "<11>" in prompts(core)[0]
    assert "<0>" not in prompts(core)[0]


async def test_a_format_is_kept_to(tmp_path: Path) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        body = await ask(server, text={"format": form})
        assert body["text"]["format"] == form
    (added,) = [message for message in core.received if isinstance(message, AddRequest)]
    assert added.params.grammar


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"background": True, "store": False}, 400, "background"),
        ({"previous_response_id": "resp_nowhere"}, 404, "previous_response_id"),
        ({"conversation": "conv_1"}, 400, "conversation"),
        ({"prompt": {"id": "p"}}, 400, "prompt"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, None),
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, 400, "input"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": [{"type": "mcp", "server_label": "x", "require_approval": "never"}]}, 400, "tools.0.server_label"),
        ({"include": ["nothing"]}, 400, None),
        ({"metadata": {"a": "b" * 513}}, 400, None),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"top_logprobs": 1000}, 400, "logprobs"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, 400, None),
        ({"model": "nobody"}, 404, "model"),
    ],
)
async def test_what_cannot_be_granted_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], status: int, param: str | None
) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(PATH, {"input": "hi", **fields})
        assert answer.status_code == status, answer.text
        if param is not None:
            assert answer.json()["error"]["param"] == param
        assert (await ask(server))["status"] == "completed"


async def test_a_store_that_fails_is_said(tmp_path: Path) -> None:
    async with running_server(tmp_path, response_store=f"sqlite:///{tmp_path}/no/such/folder.db") as server:
        answer = await server.post(PATH, {"input": "hi"})
        assert answer.status_code == 503
        assert "store" in answer.json()["error"]["message"]
        assert (await ask(server, store=False))["status"] == "completed"


async def test_responses_in_memory(tmp_path: Path) -> None:
    async with running_server(tmp_path, response_store="sqlite://") as server:
        bodies = await asyncio.gather(*(ask(server, str(number)) for number in range(20)))
        found = await asyncio.gather(*(server.http.get(f"{PATH}/{body['id']}") for body in bodies))
    assert [one.json() for one in found] == bodies


async def test_a_client_that_leaves_ends_the_answer(tmp_path: Path) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_server(tmp_path, core) as server:
        async with server.http.stream("POST", PATH, json={"input": "hi", "stream": True}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            created = json.loads((await anext(lines)).removeprefix("data: "))
            await until(lambda: core.active)
        core.allow(1)
        await until(lambda: not core.active)
        path = f"{PATH}/{created['response']['id']}"
        async with asyncio.timeout(10):
            while (found := await server.http.get(path)).status_code == 404:
                await asyncio.sleep(0.01)
    assert found.json()["status"] == "cancelled"


async def test_text_behind_a_call_does_not_cut_it_short(tmp_path: Path) -> None:
    core = calling(f"{CALL}\nDone.")
    async with thinking(tmp_path, core) as server:
        whole = await ask(server, tools=TOOLS)
        core.hold.set()
        streaming = asyncio.create_task(stream(server, tools=TOOLS))
        await until(lambda: core.active)
        core.allow(len(CALL) - 20)  # in the middle of the arguments; the rest comes at once
        core.hold.clear()
        core.allow(1)
        events = await streaming
    for output in (whole["output"], events[-1]["response"]["output"]):
        call, message = output
        assert json.loads(call["arguments"]) == {"city": "Rome"}
        assert message["content"][0]["text"] == "Done."


async def test_nobody_can_choose_the_name_under_which_a_response_is_kept(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        headers = {"x-request-id": "mine"}
        bodies = [(await server.post(PATH, {"input": text}, headers=headers)).json() for text in ("one", "two")]
        assert "ONE" in said((await server.http.get(f"{PATH}/{bodies[0]['id']}")).json())
    assert bodies[0]["id"] != bodies[1]["id"]


async def test_the_result_of_a_call_keeps_its_call(tmp_path: Path) -> None:
    items = [
        {"role": "user", "content": "x" * 400},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "warm" + "y" * 60},
    ]
    core = FakeCore()
    async with thinking(tmp_path, core) as server:
        await ask(server, items, tools=TOOLS, truncation="auto", max_output_tokens=20)
        hopeless = {"input": items, "truncation": "auto", "max_output_tokens": 1 << 30}
        assert (await server.post(PATH, hopeless)).status_code == 400
    assert "warm" in prompts(core)[0]
    assert "xxx" not in prompts(core)[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tool_calls": "1000000000000000000000"},
        {"tools": [{"type": "function", "name": "f", "parameters": "DEEP"}]},
        {"input": [{"role": "user", "content": "hi", "more": "DEEP"}]},
        {"input": [{"type": "reasoning", "encrypted_content": "BOMB"}]},
    ],
)
async def test_monsters_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    text = json.dumps({"input": "hi", **fields})
    bomb = sealed("\0" * (1 << 23))
    text = text.replace('"DEEP"', '{"a":' * 300 + "{}" + "}" * 300).replace("BOMB", bomb)
    async with running_server(tmp_path, tool_call_parser="hermes") as server:
        answer = await server.http.post(PATH, content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert (await ask(server))["status"] == "completed"


async def test_half_characters_in_arguments_are_replaced(tmp_path: Path) -> None:
    core = calling('<tool_call>\n{"name": "weather", "arguments": {"city": "\\ud800"}}\n</tool_call>')
    async with thinking(tmp_path, core) as server:
        assert (await ask(server, tools=TOOLS))["output"][0]["type"] == "function_call"
        assert (await stream(server, tools=TOOLS))[-1]["type"] == "response.completed"
