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


@on_uvloop
async def test_a_coroutine_handles_the_error_and_the_cancellation_of_what_it_waits_for_first() -> None:
    broken = asyncio.get_running_loop().create_future()
    handled: list[str] = []

    async def wait(future: asyncio.Future[None]) -> None:
        try:
            await future
        except ValueError as error:
            handled.append(str(error))
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # as a coroutine may that ends in order
            handled.append("cancelled")
            raise

    handling = run_eagerly(wait(broken))
    assert handling is not None
    broken.set_exception(ValueError("broken"))
    await handling
    assert handled == ["broken"]

    for steps in (0, 1):  # before the task has begun, and after
        cancelled = run_eagerly(wait(asyncio.get_running_loop().create_future()))
        assert cancelled is not None
        for _ in range(steps):
            await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    assert handled == ["broken", "cancelled", "cancelled"]
