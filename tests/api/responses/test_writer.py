"""Output items and their events."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire.api.answers.tools.calls import Parsed
from quire.api.responses.writer import ItemWriter
from tests.support.responses import CALL, PATH, TOOLS, answers_with, ask, events_in, reasoning_server, stream
from tests.support.server import until


@pytest.mark.parametrize("size", [1, 2, 5])
def test_log_probabilities_do_not_depend_on_how_tokens_are_grouped(size: int) -> None:
    tokens = [("\n\n", ""), ("a", "a"), ("b", "b"), ("c", "c"), ("<end>", "")]
    writer = ItemWriter(reasoning=True, encode_reasoning=False)
    for start in range(0, len(tokens), size):
        group = tokens[start : start + size]
        entries = [{"token": token, "bytes": list(token.encode())} for token, _ in group]
        parsed = Parsed()
        parsed.add_text("".join(text for _, text in group))
        list(writer.write_tokens(parsed, entries))
    list(writer.end_turn("completed"))
    (part,) = writer.items[0]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["\n\n", "a", "b", "c"]


async def test_nothing_of_an_event_comes_before_it(tmp_path: Path) -> None:
    """A replayed stream has the same events, although its items have changed since."""
    async with reasoning_server(tmp_path, answers_with()) as server:
        fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        live = await stream(server, **fields)
        again = await server.http.get(f"{PATH}/{live[0]['response']['id']}?stream=true")
    assert events_in(again.text) == live


async def test_text_behind_a_call_does_not_cut_it_short(tmp_path: Path) -> None:
    core = answers_with(f"{CALL}\nDone.")
    async with reasoning_server(tmp_path, core) as server:
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
