"""Requests that switch reasoning on or off, through each API that has such a switch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_core import FakeCore, says
from tests.support.server import Server, chunks_of, running_server

HI = [{"role": "user", "content": "hi"}]
READS = "{{ messages[-1].content }}{{ enable_thinking }}{{ thinking }}"
OFF_BY_VARIABLE: list[dict[str, Any]] = [
    {"chat_template_kwargs": {name: False}} for name in ("enable_thinking", "thinking")
]


async def chat(server: Server, fields: dict[str, Any]) -> tuple[str, str]:
    answer = (await server.post("/v1/chat/completions", {"messages": HI, **fields})).json()
    message = answer["choices"][0]["message"]
    return message.get("reasoning") or "", message["content"] or ""


async def streamed_chat(server: Server, fields: dict[str, Any]) -> tuple[str, str]:
    answer = await server.post("/v1/chat/completions", {"messages": HI, "stream": True, **fields})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(answer.text)]
    reasoning, content = ("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content"))
    return reasoning, content


async def responses(server: Server, fields: dict[str, Any]) -> tuple[str, str]:
    answer = (await server.post("/v1/responses", {"input": "hi", **fields})).json()
    texts = {item["type"]: "".join(part["text"] for part in item["content"]) for item in answer["output"]}
    return texts.get("reasoning", ""), texts.get("message", "")


async def messages(server: Server, fields: dict[str, Any]) -> tuple[str, str]:
    answer = (await server.post("/v1/messages", {"messages": HI, "max_tokens": 100, **fields})).json()
    blocks = {block["type"]: block.get("thinking") or block.get("text") for block in answer["content"]}
    return blocks.get("thinking") or "", blocks.get("text") or ""


Ask = Callable[[Server, dict[str, Any]], Awaitable[tuple[str, str]]]
OFF: list[tuple[Ask, dict[str, Any]]] = [
    *((ask, fields) for ask in (chat, streamed_chat) for fields in (*OFF_BY_VARIABLE, {"reasoning_effort": "none"})),
    *((responses, fields) for fields in (*OFF_BY_VARIABLE, {"reasoning": {"effort": "none"}})),
    *((messages, fields) for fields in (*OFF_BY_VARIABLE, {"thinking": {"type": "disabled"}})),
]


@pytest.mark.parametrize("parser", ["glm45", "glm47", "kimi_k2", "deepseek_v3", "qwen3"])
@pytest.mark.parametrize("template", [READS, "{{ messages[-1].content }}"])
async def test_with_reasoning_switched_off_all_text_is_content(tmp_path: Path, parser: str, template: str) -> None:
    text = "<think>a</think>b"
    core = FakeCore(answer=says(text))
    async with running_server(tmp_path, core, chat_template=template, reasoning_parser=parser) as server:
        for ask, fields in OFF:
            assert await ask(server, fields) == ("", text), fields


@pytest.mark.parametrize("parser", ["glm45", "glm47", "kimi_k2"])
async def test_an_end_mark_alone_ends_the_reasoning(tmp_path: Path, parser: str) -> None:
    core = FakeCore(answer=says("a</think>b"))
    async with running_server(tmp_path, core, chat_template=READS, reasoning_parser=parser) as server:
        for ask in (chat, streamed_chat, responses):
            assert await ask(server, {}) == ("a", "b")
            assert await ask(server, {"chat_template_kwargs": {"thinking": True}}) == ("a", "b")
        assert await chat(server, {"reasoning_effort": "high"}) == ("a", "b")
        assert await responses(server, {"reasoning": {"effort": "low"}}) == ("a", "b")
        assert await messages(server, {"thinking": {"type": "enabled", "budget_tokens": 1024}}) == ("a", "b")
        assert await messages(server, {}) == ("", "b")


async def test_the_servers_default_is_a_switch_that_requests_override(tmp_path: Path) -> None:
    core = FakeCore(answer=says("a</think>b"))
    settings: dict[str, Any] = {"reasoning_parser": "glm45", "chat_template": READS}
    for default in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
        async with running_server(tmp_path, core, default_chat_template_kwargs=default, **settings) as server:
            assert await chat(server, {}) == ("", "a</think>b")
            assert await chat(server, {"reasoning_effort": "low"}) == ("a", "b")


async def test_a_block_that_the_prompt_opens_is_reasoning_all_the_same(tmp_path: Path) -> None:
    core = FakeCore(answer=says("a</think>b"))
    async with running_server(tmp_path, core, chat_template="hi<think>\n", reasoning_parser="glm47") as server:
        for fields in OFF_BY_VARIABLE:
            assert await chat(server, fields) == ("a", "b")


async def test_no_effort_is_refused_if_nothing_can_switch_reasoning_off(tmp_path: Path) -> None:
    core = FakeCore(answer=says("a</think>b"))
    async with running_server(tmp_path, core, chat_template="hi", reasoning_parser="deepseek_r1") as server:
        answer = await server.post("/v1/chat/completions", {"messages": HI, "reasoning_effort": "none"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "reasoning_effort"


async def test_an_effort_that_switches_reasoning_is_not_named_as_ignored(tmp_path: Path) -> None:
    core = FakeCore(answer=says("b"))
    async with running_server(tmp_path, core, chat_template=READS, reasoning_parser="glm45") as server:
        answer = await server.post("/v1/responses", {"input": "hi", "reasoning": {"effort": "none"}})
        assert "x-quire-ignored-fields" not in answer.headers
    async with running_server(tmp_path, core, chat_template="hi") as server:
        answer = await server.post("/v1/responses", {"input": "hi", "reasoning": {"effort": "none"}})
        assert answer.headers["x-quire-ignored-fields"] == "reasoning.effort"
        body = {"messages": HI, "max_tokens": 9, "output_config": {"effort": "high"}}
        assert (await server.post("/v1/messages", body)).headers["x-quire-ignored-fields"] == "output_config.effort"
