"""Servers of tools that send too much, too slowly or something else: the response says so, and nobody else notices."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import RedirectResponse, Response, StreamingResponse

from quire.api.mcp import client as mcp_client
from tests.support.fake_core import FakeCore, says
from tests.support.hostile_tools import TOOL, Answer, HostileTools, hostile_tools, reply, reply_error
from tests.support.responses import PATH
from tests.support.server import Server, running_server, until

LIMIT = 1 << 20
_CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
_TOOLS = [{"type": "mcp", "server_label": "h", "require_approval": "never"}]
EVENTS = {"content-type": "text/event-stream"}
JSON = {"content-type": "application/json"}


def endless(piece: bytes, head: bytes = b"") -> AsyncIterator[bytes]:
    async def pieces() -> AsyncIterator[bytes]:
        yield head
        while True:
            yield piece
            await asyncio.sleep(0)

    return pieces()


def start_of(message: Any) -> bytes:
    return (
        b'{"jsonrpc": "2.0", "id": %s, "result": {"content": [{"type": "text", "text": "'
        % json.dumps(message["id"]).encode()
    )


async def endless_json(message: Any) -> Response:
    return StreamingResponse(endless(b"x" * 65536, start_of(message)), headers=JSON)


async def endless_event(message: Any) -> Response:
    return StreamingResponse(endless(b"x" * 65536, b"data: " + start_of(message)), headers=EVENTS)


async def endless_events(_: Any) -> Response:
    notice = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * 9999}}
    return StreamingResponse(endless(f"data: {json.dumps(notice)}\n\n".encode()), headers=EVENTS)


async def empty_events(_: Any) -> Response:
    return StreamingResponse(endless(b"data: \n\n" * 100), headers=EVENTS)


async def empty_lines(_: Any) -> Response:
    return StreamingResponse(endless(b"\r" * 1000), headers=EVENTS)


async def endless_error(_: Any) -> Response:
    return StreamingResponse(endless(b"x" * 65536), status_code=500, headers=JSON)


async def compressed(message: Any) -> Response:
    content = gzip.compress(start_of(message)) + gzip.compress(b"x" * (1 << 20)) * 300 + gzip.compress(b'"}]}}')
    return Response(content, headers={**JSON, "content-encoding": "gzip"})


async def many_values(message: Any) -> Response:
    return reply(message, {"content": [], "structuredContent": {"x": [[]] * 200_000}})


async def much_but_not_too_much(message: Any) -> Response:
    return reply(message, {"content": [{"type": "text", "text": "x" * (LIMIT - 1000)}]})


async def endless_redirects(_: Any) -> Response:
    return RedirectResponse("/mcp", status_code=307)


async def deep(message: Any) -> Response:
    content = '{"x":' * 5000 + "1" + "}" * 5000
    text = f'{{"jsonrpc": "2.0", "id": {json.dumps(message["id"])}, "result": {{"content": [], "structuredContent": '
    return Response(f"{text}{content}}}}}", headers=JSON)


async def huge_code(message: Any) -> Response:
    return reply_error(message, 10**30, "no")


async def not_json(_: Any) -> Response:
    return Response(b"\xff\xfe", headers=JSON)


async def silent(_: Any) -> Response:
    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(3600)
        yield b""

    return StreamingResponse(nothing(), headers=JSON)


async def dripping(message: Any) -> Response:
    async def drops() -> AsyncIterator[bytes]:
        yield start_of(message)
        while True:
            await asyncio.sleep(0.05)
            yield b"x"

    return StreamingResponse(drops(), headers=JSON)


REFUSED: dict[str, tuple[Answer, str]] = {
    "a body without end": (endless_json, "more than 1048576 bytes"),
    "an event without end": (endless_event, "more than 1048576 bytes"),
    "events without end": (endless_events, "more than 1048576 bytes"),
    "empty events": (empty_events, "lines of events"),
    "empty lines": (empty_lines, "lines of events"),
    "an error without end": (endless_error, "more than 1048576 bytes"),
    "a compressed body": (compressed, "compressed"),
    "many values": (many_values, "too many JSON values"),
    "redirects without end": (endless_redirects, "edirect"),
    "a deep value": (deep, "recursion limit"),
    "a huge code": (huge_code, "no"),
    "no JSON": (not_json, "parse"),
    "nothing": (silent, "did not answer within 2 seconds"),
    "a body in drops": (dripping, "did not answer within 2 seconds"),
}


def timeout_of(problem: str) -> float:
    return 2.0 if "2 seconds" in problem else 60.0


@asynccontextmanager
async def served(tmp_path: Path, tools: HostileTools, **settings: Any) -> AsyncIterator[Server]:
    settings = {"tool_timeout": 60.0, "max_tool_answer_size": LIMIT, "tool_call_parser": "hermes", **settings}
    core = FakeCore(answer=says(_CALL))
    async with running_server(tmp_path, core, tool_server=(f"h={tools.url}",), **settings) as server:
        yield server


async def longest_block(until_done: asyncio.Task[Any]) -> float:
    """Seconds for which the event loop ran nothing else, at most, while a task ran."""
    longest, last = 0.0, time.monotonic()
    while not until_done.done():
        await asyncio.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


async def made_call(server: Server) -> dict[str, Any]:
    answer = await server.post(PATH, {"input": "x", "tools": _TOOLS, "max_tool_calls": 1})
    assert answer.status_code == 200, answer.text
    call: dict[str, Any]
    call, *_ = [item for item in answer.json()["output"] if item["type"] == "mcp_call"]
    return call


@pytest.mark.parametrize("case", REFUSED)
async def test_an_answer_of_a_call_is_bounded(tmp_path: Path, case: str) -> None:
    answer, problem = REFUSED[case]
    async with hostile_tools() as tools, served(tmp_path, tools, tool_timeout=timeout_of(problem)) as server:
        tools.answers["tools/call"] = answer
        call = await made_call(server)
        assert call["output"] is None
        assert problem in call["error"]["message"]
        assert tools.sent < 16 << 20  # the rest stays in buffers of the system
        tools.answers.clear()
        assert (await server.post(PATH, {"input": "x", "tools": _TOOLS})).status_code == 200


@pytest.mark.parametrize(
    ("method", "case"),
    [
        *(("tools/list", case) for case in REFUSED),
        ("initialize", "no JSON"),
        *(pytest.param("initialize", case, marks=pytest.mark.slow) for case in REFUSED if case != "no JSON"),
    ],
)
async def test_an_answer_before_the_response_is_bounded(tmp_path: Path, case: str, method: str) -> None:
    answer, problem = REFUSED[case]
    async with hostile_tools() as tools, served(tmp_path, tools, tool_timeout=timeout_of(problem)) as server:
        tools.answers[method] = answer
        refused = await server.post(PATH, {"input": "x", "tools": _TOOLS})
        assert refused.status_code == 424, refused.text
        assert len(refused.content) < 5000
        assert tools.sent < 16 << 20


async def test_an_answer_within_the_limit_is_taken(tmp_path: Path) -> None:
    async with hostile_tools() as tools, served(tmp_path, tools) as server:
        tools.answers["tools/call"] = much_but_not_too_much
        call = await made_call(server)
        assert (call["error"], call["output"]) == (None, "x" * (LIMIT - 1000))


@pytest.mark.parametrize("kind", ["pages", "tools"])
async def test_a_list_without_end_is_refused(tmp_path: Path, kind: str) -> None:
    pages = 0

    async def page(message: Any) -> Response:
        nonlocal pages
        pages += 1
        tools = [{**TOOL, "name": f"f{pages}-{number}"} for number in range(1 if kind == "pages" else 300)]
        return reply(message, {"tools": tools, "nextCursor": str(pages)})

    async with hostile_tools() as tools, served(tmp_path, tools) as server:
        tools.answers["tools/list"] = page
        refused = await server.post(PATH, {"input": "x", "tools": _TOOLS})
    assert refused.status_code == 424
    assert ("more than 100 pages" if kind == "pages" else "more than 1024 tools") in refused.json()["error"]["message"]
    assert pages == (100 if kind == "pages" else 4)


async def test_a_redirect_to_another_server_is_not_followed(tmp_path: Path) -> None:
    async with hostile_tools() as inner, hostile_tools() as tools, served(tmp_path, tools) as server:

        async def away(_: Any) -> Response:
            return RedirectResponse(inner.url, status_code=307)

        tools.answers["tools/call"] = away
        call = await made_call(server)
        assert "not followed" in call["error"]["message"]
        assert inner.paths == []


async def test_a_result_is_not_checked_against_the_schema_of_the_server(tmp_path: Path) -> None:
    """A pattern could take hours, in which nothing else runs."""

    async def with_pattern(message: Any) -> Response:
        schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(a|a)*$"}}}
        return reply(message, {"tools": [{**TOOL, "outputSchema": schema}]})

    async def structured(message: Any) -> Response:
        return reply(message, {"content": [], "structuredContent": {"x": "a" * 40 + "!"}})

    async with hostile_tools() as tools, served(tmp_path, tools) as server:
        tools.answers |= {"tools/list": with_pattern, "tools/call": structured}
        call = await made_call(server)
        assert json.loads(call["output"]) == {"x": "a" * 40 + "!"}


async def test_a_session_that_cannot_be_ended_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_client, "_CLOSE_TIMEOUT", 0.05)

    async def with_session(message: Any) -> Response:
        answer = reply(
            message, {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "x", "version": "1"}}
        )
        answer.headers["mcp-session-id"] = "s"
        return answer

    async with hostile_tools() as tools, served(tmp_path, tools, tool_timeout=600.0) as server:
        tools.answers |= {"initialize": with_session, "DELETE": silent}
        assert (await made_call(server))["output"] == "fine"
        assert "DELETE /mcp" in tools.paths


async def test_what_servers_send_is_parsed_in_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    texts = mcp_client._texts

    def noted(result: Any) -> list[str]:
        threads.add(threading.current_thread().name)
        return texts(result)

    monkeypatch.setattr(mcp_client, "_texts", noted)
    async with hostile_tools() as tools, served(tmp_path, tools) as server:
        assert (await made_call(server))["output"] == "fine"
    assert threads == {"quire-tools"}
    await until(lambda: "quire-tools" not in {thread.name for thread in threading.enumerate()})


async def test_answers_of_all_servers_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.api.mcp.servers._MEMORY", 0)  # room for two
    release = asyncio.Event()

    async def held(message: Any) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield start_of(message) + b"x" * (LIMIT - 2000)
            await release.wait()
            yield b'"}]}}'

        return StreamingResponse(parts(), headers=JSON)

    async with hostile_tools() as tools, served(tmp_path, tools) as server:
        tools.answers["tools/call"] = held
        waiting = [asyncio.create_task(made_call(server)) for _ in range(3)]
        await until(lambda: any(task.done() for task in waiting))
        (refused,) = [task.result() for task in waiting if task.done()]
        assert "Please retry later" in refused["error"]["message"]
        release.set()
        assert [call["error"] for call in await asyncio.gather(*waiting)].count(None) == 2
