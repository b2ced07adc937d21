"""Deadline: the shortest timeout counts, and all that is done for a request shares it."""

from __future__ import annotations

import asyncio

import pytest

from quire.engine.client.deadline import Deadline
from quire.engine.client.errors import DeadlineExceeded


async def test_the_shortest_timeout_counts_and_is_in_the_error() -> None:
    errors = asyncio.Queue[DeadlineExceeded]()
    Deadline(60.0, 0.01, None, 0).call(errors.put_nowait)
    assert str(await errors.get()) == "The request timed out after 0.01 seconds."


async def test_without_a_timeout_there_is_no_end() -> None:
    deadline = Deadline(None, 0)
    deadline.check()
    deadline.call(lambda error: pytest.fail(str(error)))()
    async with deadline.enforced():
        await asyncio.sleep(0)


async def test_an_alarm_can_be_stopped() -> None:
    errors = list[DeadlineExceeded]()
    late, stopped = Deadline(0.01), Deadline(0.005)
    stopped.call(errors.append)()
    with pytest.raises(DeadlineExceeded):
        async with late.enforced():
            await asyncio.Event().wait()
    assert errors == []
    with pytest.raises(DeadlineExceeded, match=r"after 0\.01 seconds"):
        late.check()


async def test_another_timeout_inside_is_not_taken_for_it() -> None:
    with pytest.raises(TimeoutError):
        async with Deadline(60.0).enforced(), asyncio.timeout(0.001):
            await asyncio.Event().wait()
