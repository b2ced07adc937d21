"""A chat template given by the operator is looked at before anybody is served."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ChatOptions
from quire.multimodal.errors import PromptError
from quire.multimodal.renderer import Renderer
from quire.multimodal.tokenizer import Tokenizer
from tests.support.server import running_server
from tests.support.tokenizer import write_tokenizer


def test_a_broken_template_file_is_refused_at_the_start(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for message in messages %}")
    with pytest.raises(PromptError, match="chat template is not valid"):
        Renderer(tmp_path, Tokenizer.load(tmp_path), ChatOptions(chat_template=broken), 100)


COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


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
