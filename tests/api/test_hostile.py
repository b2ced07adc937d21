"""Requests that were made to hurt: none holds up the others, none is answered with a 500."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from quire.multimodal.renderer import Renderer
from tests.support.server import running_server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]


async def is_held_up(task: asyncio.Task[Any]) -> bool:
    """Whether the event loop stood still for most of the time that a task took."""
    began = last = time.monotonic()
    worst = 0.0
    while not task.done():
        await asyncio.sleep(0.001)
        worst, last = max(worst, time.monotonic() - last), time.monotonic()
    return worst > max(0.4, (last - began) / 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["a", 1] * 500_000}),
        (COMPLETIONS, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(200_000)), "a")}),
        (CHAT, {"messages": [5] * 500_000}),
        ("/detokenize", {"tokens": ["a"] * 500_000}),
    ],
)
async def test_a_million_mistakes_are_answered_at_once(tmp_path: Path, path: str, body: Any) -> None:
    async with running_server(tmp_path) as server:
        content = json.dumps(body)
        began = time.monotonic()
        answer = await server.http.post(path, content=content, headers={"content-type": "application/json"})
        assert time.monotonic() - began < 5
        assert answer.status_code == 400
        assert len(answer.text) < 2000


async def test_long_texts_do_not_hold_up_others(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        text = "some words " * 80_000
        renderer = server.services.models[0].renderer
        task = asyncio.create_task(renderer.text(text, add_special_tokens=False))
        assert not await is_held_up(task)
        tokens = (await task).token_ids.tolist() * 4
        assert not await is_held_up(asyncio.create_task(renderer.decode(tokens)))


async def test_texts_that_need_not_fit_have_a_limit_too(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        text = "x" * ((1 << 20) + 1)
        for path, body in (
            ("/tokenize", {"prompt": text}),
            ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
            (COMPLETIONS, {"prompt": text, "truncate_prompt_tokens": 5}),
            (CHAT, {"messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": 5}),
        ):
            answer = await server.post(path, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_text")
            assert "characters" in answer.json()["error"]["message"]


DEEP = "[" * 100_000
HALF = r'"\ud800"'


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"function": "abc"}]},
        {"role": "assistant", "tool_calls": [{"function": ["a"]}]},
        {"role": "assistant", "tool_calls": [{"function": 5}]},
        {"role": "assistant", "tool_calls": ["a"]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": f'{{"a": {HALF}}}'}}]},
        {"role": "user", "content": [{"type": []}]},
        {"role": "user", "content": [{"type": {}}]},
    ],
)
async def test_messages_that_are_none_are_refused(tmp_path: Path, message: dict[str, Any]) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ (m.tool_calls or []) | tojson }}{% endfor %}"
    async with running_server(tmp_path, chat_template=template) as server:
        answer = await server.post(CHAT, {"messages": [*HI, message]})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith(("messages.1", "messages[1]"))


@pytest.mark.parametrize("field", ["prompt", "stop", "cache_salt", "model", "nonsense"])
async def test_half_characters_are_refused(tmp_path: Path, field: str) -> None:
    async with running_server(tmp_path) as server:
        body = f'{{"prompt": "x", "{field}": {HALF}}}'
        answer = await server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400


@pytest.mark.parametrize(
    "template",
    [
        "{{" + "(" * 5000,
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{{ " + "+".join(["a"] * 20_000) + " }}",
        r"{{ '\ud800' }}",
        r"{{ raise_exception('\ud800') }}",
        "{{ 'x' * 10 ** 15 }}",
        "{{ 'x'.encode('none') }}",
    ],
)
async def test_hostile_templates_are_refused(tmp_path: Path, template: str) -> None:
    async with running_server(tmp_path, trust_request_chat_template=True) as server:
        answer = await server.post(CHAT, {"messages": HI, "chat_template": template})
        assert answer.status_code == 400, answer.text


async def test_only_json_is_taken(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""):
            headers = {"content-type": kind} if kind else {}
            answer = await server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == "Unsupported Media Type: Only 'application/json' is allowed"
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        answer = await server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 200


async def test_our_own_mistakes_do_not_end_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("our mistake")

    async with running_server(tmp_path) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        monkeypatch.setattr(Renderer, "text", broken)
        with caplog.at_level(logging.ERROR):
            status, body = await raw_post(reader, writer)
        assert (status, json.loads(body)["error"]["code"]) == (500, 500)
        assert "our mistake" in caplog.text
        assert "our mistake" not in body
        monkeypatch.undo()
        assert (await raw_post(reader, writer))[0] == 200
        writer.close()


async def raw_post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, str]:
    """Status and body of a completion over a connection that is kept."""
    body = b'{"prompt": "x"}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    (length,) = [int(line.partition(":")[2]) for line in lines if line.startswith("content-length")]
    return int(lines[0].split()[1]), (await reader.readexactly(length)).decode()


async def test_a_large_body_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async with running_server(tmp_path, max_body_size=1000) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n".encode())
        async with asyncio.timeout(5):
            assert b" 413 " in await reader.readline()
        writer.close()


async def test_field_names_cannot_forge_lines_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_server(tmp_path) as server:
        with caplog.at_level(logging.WARNING):
            await server.post(COMPLETIONS, {"prompt": "x", "foo\r\nX: y": 1, "long" * 1000: 1})
    (line,) = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert "foo%0D%0AX%3A y" in line
    assert "\n" not in line
    assert len(line) < 300
