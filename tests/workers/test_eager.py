"""Coroutines that begin at once."""

from __future__ import annotations

import asyncio

import pytest

from quire.workers.eager import run_eagerly
from tests.support.raw import on_uvloop


@on_uvloop
async def test_what_does_not_wait_has_ended_when_the_call_returns() -> None:
    done = []

    async def work() -> None:
        done.append(True)

    assert run_eagerly(work()) is None
    assert done == [True]


@on_uvloop
async def test_what_waits_goes_on_as_a_task() -> None:
    event, steps = asyncio.Event(), ["called"]

    async def work() -> None:
        steps.append("begun")
        await event.wait()
        steps.append("woken")
        await asyncio.sleep(0)
        steps.append("ended")

    task = run_eagerly(work())
    assert steps == ["called", "begun"]
    event.set()
    assert task is not None
    await task
    assert steps == ["called", "begun", "woken", "ended"]


@on_uvloop
async def test_errors_and_cancellation_arrive() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    async def fail_later() -> None:
        await asyncio.sleep(0)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_eagerly(fail())
    later = run_eagerly(fail_later())
    assert later is not None
    with pytest.raises(ValueError, match="broken"):
        await later

    ended = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    task = run_eagerly(wait())
    assert task is not None
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
