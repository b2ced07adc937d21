"""Responses that are stored, streamed again, continued, cancelled or run in the background."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from quire.api.responses.store import ResponseStore, StoredResponse
from tests.support.fake_core import FakeCore
from tests.support.responses import (
    PATH,
    TOOLS,
    answers_with,
    ask,
    events_in,
    output_text,
    prompts,
    reasoning_server,
    stream,
)
from tests.support.server import running_server, until


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
    core = answers_with()
    async with reasoning_server(tmp_path, core) as server:
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


@pytest.mark.parametrize("nothing", ["", []])
async def test_an_empty_input_adds_no_turn_to_a_conversation(tmp_path: Path, nothing: Any) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        first = await ask(server, "one")
        second = await ask(server, nothing, previous_response_id=first["id"])
        items = (await server.http.get(f"{PATH}/{second['id']}/input_items")).json()["data"]
    assert [item["role"] for item in reversed(items)] == ["user", "assistant"]
    assert prompts(core)[1].count("user") == prompts(core)[0].count("user") == 1


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
        assert "HELLO" in output_text(whole)
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
        await ResponseStore(url, 0).save(StoredResponse(owner="", response=left, items=[], lease=1.0))
        stored = (await server.http.get(f"{PATH}/{body['id']}")).json()
    assert (stored["status"], stored["error"]["code"]) == ("failed", "server_error")


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
        async with asyncio.timeout(60):
            while (cancelled := await server.http.get(path)).status_code == 404:
                await asyncio.sleep(0.01)
    assert cancelled.json()["status"] == "cancelled"


async def test_nobody_can_choose_the_name_under_which_a_response_is_kept(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        headers = {"x-request-id": "mine"}
        bodies = [(await server.post(PATH, {"input": text}, headers=headers)).json() for text in ("one", "two")]
        assert "ONE" in output_text((await server.http.get(f"{PATH}/{bodies[0]['id']}")).json())
    assert bodies[0]["id"] != bodies[1]["id"]


async def test_a_number_beyond_the_last_event_is_refused(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        events = await stream(server, "hello")
        path = f"{PATH}/{events[0]['response']['id']}"
        answer = await server.http.get(path, params={"stream": True, "starting_after": len(events)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")
    assert str(len(events)) in answer.json()["error"]["message"]


async def test_a_stream_that_a_dead_server_left_ends(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'kept.db'}"
    async with running_server(tmp_path, response_store=url) as server:
        events = await stream(server)
        response = events[0]["response"]
        async with aclosing(ResponseStore(url, 0)) as store:
            await store.save(StoredResponse(owner="", response=response, items=[], events=events[:3], lease=1.0))
        replayed = events_in((await server.http.get(f"{PATH}/{response['id']}", params={"stream": True})).text)
    assert replayed[:3] == events[:3]
    assert (replayed[3]["type"], replayed[3]["sequence_number"]) == ("response.failed", 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("after", "nowhere"),
        ("after", "x" * 5000),
        ("after", ""),
        ("limit", 0),
        ("limit", 101),
        ("limit", "x"),
        ("order", "up"),
    ],
)
async def test_pages_that_do_not_exist_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    async with running_server(tmp_path) as server:
        body = await ask(server)
        answer = await server.http.get(f"{PATH}/{body['id']}/input_items", params={name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert len(answer.text) < 1000


async def test_every_item_is_on_one_page_whatever_its_id(tmp_path: Path) -> None:
    """Clients may give items the same id, and send items again that the conversation has already."""
    same = [{"role": "user", "content": str(number), "id": "same"} for number in range(3)]
    async with running_server(tmp_path) as server:
        first = await ask(server, [*same, {"role": "user", "content": "3", "id": "same-2"}])
        second = await ask(server, [*same, *first["output"]], previous_response_id=first["id"])
        path = f"{PATH}/{second['id']}/input_items"
        for order in ("asc", "desc"):
            contents, ids, after = [], [], None
            for _ in range(9):
                params = {"limit": 1, "order": order, **({} if after is None else {"after": after})}
                page = (await server.http.get(path, params=params)).json()
                contents += [item["content"] for item in page["data"]]
                ids.append(after := page["last_id"])
                assert page["has_more"] == (len(ids) < 9)
            texts = [text for text in contents if isinstance(text, str)]
            assert texts == (["0", "1", "2", "3", "0", "1", "2"] if order == "asc" else list("2103210"))
            assert len(set(ids)) == 9
