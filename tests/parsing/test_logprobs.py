"""Log-probabilities are written in steps, between which the event loop goes on."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Sequence
from typing import Any

import orjson
import pytest

from quire.engine.client.protocol import AddRequest, TokenLogprobs
from quire.parsing.logprobs import CompletionLogprobColumns, LogprobFormatter, TextPosition, encode_entries
from quire.rendering.tokenizer import Tokenizer
from tests.support.fake_core import FakeCore, prompt_of
from tests.support.server import running_server
from tests.support.tokenizer import byte_tokenizer

FORMATTER = LogprobFormatter(Tokenizer(byte_tokenizer(), {}), as_ids=False)
WIDTH = 21


def entries(count: int) -> list[TokenLogprobs]:
    ids = [[i % 256, *range(WIDTH - 1)] for i in range(count)]
    return [TokenLogprobs(row, [-float(i) for i in range(WIDTH)], list(range(1, WIDTH + 1))) for row in ids]


async def ticks_during(work: Awaitable[Any]) -> tuple[Any, int]:
    """The result of some work, and how often the event loop came around meanwhile."""
    task, ticks = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0)
        ticks += 1
    return await task, ticks


def parsed(fragment: orjson.Fragment) -> Any:
    return json.loads(orjson.dumps(fragment))


@pytest.mark.parametrize("count", [0, 1, 30, 2000])
async def test_arrays_are_written_in_steps(count: int) -> None:
    expected = entries(count)
    for format_entries in (FORMATTER.chat, FORMATTER.prompt):
        fragment, ticks = await ticks_during(encode_entries(expected, format_entries))
        assert parsed(fragment) == format_entries(expected)
        assert ticks >= count * WIDTH // 1000


async def test_columns_are_written_in_steps() -> None:
    expected, tokens = [None, *entries(999)], prompt_of("a\u20acb" * 200).tolist()

    async def written(*parts: Sequence[Any]) -> orjson.Fragment:
        columns = CompletionLogprobColumns(FORMATTER, TextPosition())
        for first, end in parts:
            await columns.extend(expected[first:end], tokens[first:end])
        return columns.json()

    fragment, ticks = await ticks_during(written((0, 1000)))
    assert ticks >= 20
    assert parsed(fragment) == FORMATTER.completion(expected, tokens, TextPosition())
    assert parsed(await written((0, 2), (2, 500), (500, 1000))) == parsed(fragment)


async def test_a_copy_of_columns_goes_on_by_itself() -> None:
    expected, tokens = entries(6), prompt_of("a\u20acbc").tolist()
    columns = CompletionLogprobColumns(FORMATTER, TextPosition())
    await columns.extend(expected[:2], tokens[:2])
    for _ in range(2):
        copied = copy.copy(columns)
        await copied.extend(expected[2:], tokens[2:])
        assert parsed(copied.json()) == FORMATTER.completion(expected, tokens, TextPosition())


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}])
async def test_answers_to_one_prompt_share_its_logprobs(tmp_path: Any, fields: dict[str, Any]) -> None:
    core = FakeCore()
    async with running_server(tmp_path, core) as server:
        body = {"prompt": ["hello", "ab"], "n": 3, "max_tokens": 2, **fields}
        choices = (await server.post("/v1/completions", body)).json()["choices"]
    asked = [message.sampling_params.prompt_logprobs for message in core.received if isinstance(message, AddRequest)]
    assert sorted(asked, key=str) == [2, 2, None, None, None, None]
    for first in (0, 3):
        name = "logprobs" if "echo" in fields else "prompt_logprobs"
        assert choices[first][name] == choices[first + 1][name] == choices[first + 2][name]
        assert choices[first][name]
    if "echo" in fields:
        assert choices[1]["logprobs"]["tokens"] == list("helloHE")
        assert choices[4]["logprobs"]["text_offset"] == [0, 1, 2, 3]
