"""Output items and their events."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire.api.responses.writer import ItemWriter
from quire.parsing.tools.calls import CallDelta, Parsed
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
    assert [entry["token"] for entry in part["logprobs"]] == ["\n\n", "a", "b", "c"]


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


@pytest.mark.timeout(30)
def test_long_answers_are_written_in_linear_time() -> None:
    """At sizes at which quadratic costs would take minutes."""
    writer, count = ItemWriter(reasoning=True, encode_reasoning=False), 100_000
    parsed, entries = Parsed(), [{"token": "x", "bytes": [120]}] * count
    parsed.add_text("x" * count)
    list(writer.write_tokens(parsed, entries))  # the deltas of a slow reader, merged
    for _ in range(count):
        parsed = Parsed()
        parsed.add_text("y" * 50)
        list(writer.write_tokens(parsed, []))
    for index in range(20_000):
        parsed = Parsed()
        parsed.add_call(CallDelta(index, f"c{index}", "now", "{}"))
        list(writer.write_tokens(parsed, []))
    events = list(writer.end_turn("completed"))
    assert events[-1]["output_index"] == 20_000
    (part,) = writer.items[0]["content"]
    assert (len(part["text"]), len(part["logprobs"])) == (count * 51, count)


def test_an_answer_that_is_cut_off_keeps_its_text() -> None:
    writer, parsed = ItemWriter(reasoning=True, encode_reasoning=False), Parsed()
    parsed.add_text("half an ans")
    list(writer.write_tokens(parsed, []))
    writer.abort()
    assert writer.items[0]["content"][0]["text"] == "half an ans"
    assert writer.items[0]["status"] == "incomplete"
