"""Prompts are made off the event loop: small jobs in threads, large ones and unknown templates in processes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from quire.config.options import ChatOptions
from quire.multimodal.errors import PromptError
from quire.rendering.prompts import Conversation
from quire.rendering.renderer import MAX_VALUES, Renderer
from quire.rendering.tokenizer import Tokenizer
from quire.workers.errors import JobTimedOut, QueueFull
from quire.workers.limits import WorkerLimits
from quire.workers.pool import WorkerPool
from tests.support.server import Server, running_server, until
from tests.support.tokenizer import CHAT_TEMPLATE, write_tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
# As many templates show optional parameters.
QUADRATIC = CHAT_TEMPLATE + (
    "{% for t in tools or () %}{% for p in t.function.parameters.properties %}"
    "{% if p not in t.function.parameters.required %}?{% endif %}{% endfor %}{% endfor %}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def tool(properties: int) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {f"property{number}": {} for number in range(properties)},
        "required": [f"required{number}" for number in range(properties)],
    }
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@asynccontextmanager
async def running_renderer(
    folder: Path, *, template: str = CHAT_TEMPLATE, seconds: float = 10.0, memory: int = 1 << 29
) -> AsyncIterator[Renderer]:
    write_tokenizer(folder, chat_template=template)
    limits = WorkerLimits(memory=memory, seconds=seconds, stack=1 << 23)
    renderer = Renderer(folder, Tokenizer.load(folder), ChatOptions(), 1 << 20, limits=limits)
    try:
        yield renderer
    finally:
        await renderer.close()


def test_a_broken_template_file_is_refused_at_the_start(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for message in messages %}")
    for template in (str(broken), broken.read_text()):
        with pytest.raises(PromptError, match="chat template is not valid"):
            Renderer(tmp_path, Tokenizer.load(tmp_path), ChatOptions(chat_template=template), 100)


async def test_a_template_may_be_given_as_text_or_as_a_file(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    text = "said: {{ messages[0]['content'] }}"
    (tmp_path / "template.jinja").write_text(text)
    for template in (text, str(tmp_path / "template.jinja")):
        tokenizer = Tokenizer.load(tmp_path)
        renderer = Renderer(tmp_path, tokenizer, ChatOptions(chat_template=template), 100)
        try:
            prompt = await renderer.chat(Conversation(messages=[{"role": "user", "content": "hi"}]))
            assert tokenizer.backend.decode(prompt.prompt.token_ids.tolist()) == "said: hi"
        finally:
            await renderer.close()


async def is_held_up(task: asyncio.Task[Any]) -> bool:
    """Whether the event loop stood still for most of the time that a task took."""
    began = last = time.monotonic()
    worst = 0.0
    while not task.done():
        await asyncio.sleep(0.001)
        worst, last = max(worst, time.monotonic() - last), time.monotonic()
    return worst > max(0.4, (last - began) / 2)


async def test_long_texts_do_not_hold_up_others(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        text = "some words " * 80_000
        renderer = server.state.models[0].renderer
        task = asyncio.create_task(renderer.text(text, add_special_tokens=False))
        assert not await is_held_up(task)
        tokens = (await task).token_ids
        assert not await is_held_up(asyncio.create_task(renderer.decode(tokens)))


async def test_texts_that_need_not_fit_have_a_limit_too(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        text = "x" * ((1 << 20) + 1)
        for path, body, param in (
            ("/tokenize", {"prompt": text}, "input_text"),
            ("/tokenize", {"messages": [{"role": "user", "content": text}]}, "input_text"),
            (COMPLETIONS, {"prompt": text, "truncate_prompt_tokens": 5}, "input_text"),
            (CHAT, {"messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": 5}, "input_text"),
        ):
            answer = await server.post(path, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert str(1 << 20) in answer.json()["error"]["message"]


async def test_a_process_makes_the_same_prompt_as_a_thread(tmp_path: Path) -> None:
    few: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
    ]
    async with running_renderer(tmp_path) as renderer:
        small = await renderer.chat(Conversation(messages=few, add_generation_prompt=False))
        large = await renderer.chat(Conversation(messages=few * 2000, add_generation_prompt=False))
        text = "some words " * 40_000
        tokens = (await renderer.text(text, add_special_tokens=False)).token_ids
        with pytest.raises(PromptError, match="at most 1048576"):
            await renderer.decode(np.ones((1 << 20) + 1, np.int32))
        with pytest.raises(PromptError, match="not supported") as refused:
            await renderer.chat(Conversation(messages=[*few * 2000, {"role": "user", "content": [{"type": "x"}]}]))
    assert large.prompt.text == (small.prompt.text or "") * 2000
    assert large.prompt.token_ids.tolist() == small.prompt.token_ids.tolist() * 2000
    assert (large.final_text, large.variables) == (small.final_text, small.variables)
    assert len(tokens) == len(text)
    assert refused.value.param == "messages[4000].content[0]"


async def test_a_quadratic_template_has_a_time_limit_and_delays_nobody(tmp_path: Path) -> None:
    async with running_renderer(tmp_path, template=QUADRATIC, seconds=1.0) as renderer:
        hostile = Conversation(messages=HI, tools=[tool(50_000)])
        rendering = [asyncio.ensure_future(renderer.chat(hostile, tenant="hostile")) for _ in range(4)]
        await asyncio.sleep(0)
        for _ in range(20):
            await renderer.chat(Conversation(messages=HI), tenant="other")
        assert not any(task.done() for task in rendering)
        with pytest.raises(PromptError, match=r"Rendering the chat took more than 1 s\.") as refused:
            await rendering[0]
        assert refused.value.param == "tools"
        for task in rendering:
            task.cancel()
        await asyncio.wait(rendering)


async def test_the_process_of_a_client_that_has_gone_is_ended(tmp_path: Path) -> None:
    async with running_renderer(tmp_path, seconds=60.0) as renderer:
        await renderer.chat(Conversation(messages=HI, template="{{ messages[0].content }}"))
        rendering = asyncio.ensure_future(renderer.chat(Conversation(messages=HI, template=ENDLESS)))
        await until(lambda: any(renderer._processes._jobs.values()))
        workers = [psutil.Process(worker.pid) for worker in renderer._processes._jobs.values() if worker]
        rendering.cancel()
        await asyncio.wait([rendering])
        await until(lambda: not any(worker.is_running() for worker in workers))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS, "took more than 1 s"),
        ("{{ 'x' * 10 ** 10 }}", "MemoryError|memory"),
        ("{% if %}", "not valid"),
    ],
)
async def test_templates_of_requests_have_limits(tmp_path: Path, template: str, message: str) -> None:
    async with running_renderer(tmp_path, seconds=1.0) as renderer:
        with pytest.raises(PromptError, match=message):
            await renderer.chat(Conversation(messages=HI, template=template))
        chat = await renderer.chat(Conversation(messages=HI, template="{{ messages[0].content }}"))
        assert chat.prompt.text == "hi"


async def test_the_number_of_values_has_a_limit(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        many = [[1] * (MAX_VALUES // 2)] * 2
        body = {"messages": HI, "chat_template_kwargs": {"names": many}}
        answer = await server.post(CHAT, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")
        assert str(MAX_VALUES) in answer.json()["error"]["message"]


async def test_a_full_queue_of_prompts_is_a_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise QueueFull("64 jobs wait already")

    async with running_server(tmp_path) as server:
        monkeypatch.setattr(Renderer, "chat", full)
        answer = await server.post(CHAT, {"messages": HI})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        answer = await server.post("/v1/messages", {"messages": HI, "max_tokens": 5})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")


async def test_a_prompt_that_gets_no_processor_time_is_a_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stalled(*_: Any, **__: Any) -> None:
        raise JobTimedOut("took more than 10 s", stalled=True)

    monkeypatch.setattr(WorkerPool, "run", stalled)
    async with running_server(tmp_path) as server:
        answer = await server.post(COMPLETIONS, {"prompt": "some words " * 40_000, "truncate_prompt_tokens": 5})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_arguments_of_tool_calls_are_values_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process: list[Any] = []

    async def run(self: WorkerPool, job: Any, **_: Any) -> None:
        in_process.append(job)

    monkeypatch.setattr(WorkerPool, "run", run)
    async with running_renderer(tmp_path) as renderer:
        for arguments in ('{"a": 1}', json.dumps([{}] * 5_000)):
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            await renderer.chat(Conversation(messages=[*HI, {"role": "assistant", "tool_calls": [call]}]))
    assert len(in_process) == 1


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/messages/count_tokens", "/v1/responses"])
async def test_a_waiting_prompt_of_a_client_that_has_gone_is_dropped(tmp_path: Path, path: str) -> None:
    async with running_server(tmp_path) as server, all_threads_busy(server) as renderer:
        body = {"input": "hi"} if path == "/v1/responses" else {"messages": HI}
        request = asyncio.ensure_future(server.post(path, body))
        await until(lambda: len(renderer._threads._queue) == 1)
        request.cancel()
        await until(lambda: len(renderer._threads._queue) == 0)
        await until(lambda: server.state.models[0].client.slots_in_use == 0)


@asynccontextmanager
async def all_threads_busy(server: Server) -> AsyncIterator[Renderer]:
    renderer, leave = server.state.models[0].renderer, threading.Event()
    running = [asyncio.ensure_future(renderer._threads.run(leave.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    try:
        yield renderer
    finally:
        leave.set()
        await asyncio.gather(*running)
