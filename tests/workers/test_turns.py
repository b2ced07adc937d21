"""Turns: however many slices wait, an iteration of the event loop runs one of them."""

from __future__ import annotations

import asyncio
import logging

import pytest

from quire.workers.turns import turns
from tests.support.iterations import Iterations


async def test_one_slice_of_all_tasks_runs_per_iteration() -> None:
    with Iterations() as iterations:

        async def work(flow: str) -> None:
            for _ in range(5):
                await turns().take(flow)
                iterations.note()

        await asyncio.gather(*(work(f"tenant {index % 7}") for index in range(100)))
    assert (iterations.total, iterations.most) == (500, 1)


async def test_tenants_take_turns() -> None:
    order = ""

    async def work(flow: str) -> None:
        nonlocal order
        await turns().take(flow)
        order += flow

    await asyncio.gather(*(work("a") for _ in range(50)), work("b"), work("c"), work("b"))
    assert order[:7] in ("aabcaba", "abacaba"), "the first one does not wait"
    assert sorted(order) == sorted("a" * 50 + "bbc")


async def test_a_single_task_gives_way_to_others() -> None:
    order = []

    async def work() -> None:
        for _ in range(3):
            await turns().take("")
            order.append("slice")
        order.append("end")

    async def other() -> None:
        while "end" not in order:
            order.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(work(), other())
    assert order.count("other") >= 3
    assert "slice,slice" not in ",".join(order)


async def test_functions_and_tasks_share_the_iterations() -> None:
    with Iterations() as iterations:

        async def work() -> None:
            await turns().take("task")
            iterations.note()

        tasks = [asyncio.create_task(work()) for _ in range(20)]
        for _ in range(20):
            turns().run("function", iterations.note)
        await asyncio.gather(*tasks)
        while iterations.total < 40:
            await asyncio.sleep(0)
    assert iterations.most <= 2, "a function, and the task that was woken in the iteration before"


async def test_thousands_of_tasks_that_stop_waiting_take_no_turns() -> None:
    async def work() -> None:
        await turns().take("leaves")

    tasks = [asyncio.create_task(work()) for _ in range(5000)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    with Iterations() as iterations:
        await turns().take("stays")
        iterations.note()
    assert max(iterations._notes) < 10
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_function_that_fails_does_not_hold_up_others(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("broken")

    await turns().take("")
    turns().run("", fail)
    with caplog.at_level(logging.ERROR):
        await turns().take("")
    assert "broken" in caplog.text
