"""Threads whose tenants take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from quire.workers.errors import QueueFull, WorkerError
from quire.workers.threads import FairThreads


@contextmanager
def busy(threads: FairThreads) -> Iterator[threading.Event]:
    """Occupy the only thread until the event is set."""
    leave = threading.Event()
    running = asyncio.ensure_future(threads.run(leave.wait))
    try:
        yield leave
    finally:
        leave.set()
        running.add_done_callback(lambda done: done.cancelled() or done.exception())


def noted(order: list[str], name: str) -> Callable[[], None]:
    return lambda: order.append(name)


async def test_one_tenant_with_many_jobs_does_not_delay_the_others() -> None:
    threads, order = FairThreads("test", size=1, max_queued=100), list[str]()
    with busy(threads) as leave:
        await asyncio.sleep(0)
        jobs = [asyncio.ensure_future(threads.run(noted(order, f"a{n}"), tenant="a")) for n in range(50)]
        jobs += [asyncio.ensure_future(threads.run(noted(order, name), tenant=name)) for name in "bc"]
        await asyncio.sleep(0)
        leave.set()
        await asyncio.gather(*jobs)
    assert order[:4] == ["a0", "b", "c", "a1"]
    assert len(order) == 52
    threads.close()


async def test_a_job_that_nobody_waits_for_is_dropped() -> None:
    threads, order = FairThreads("test", size=1), list[str]()
    with busy(threads) as leave:
        await asyncio.sleep(0)
        dropped, finished = (asyncio.ensure_future(threads.run(noted(order, name))) for name in ("dropped", "kept"))
        await asyncio.sleep(0)
        dropped.cancel()
        leave.set()
        await finished
    assert order == ["kept"]
    assert await threads.run(lambda: 5) == 5
    threads.close()


async def test_a_caller_that_leaves_during_its_job_does_not_free_the_thread() -> None:
    threads, order = FairThreads("test", size=1), list[str]()
    leave = threading.Event()
    running = asyncio.ensure_future(threads.run(leave.wait))
    await asyncio.sleep(0)
    running.cancel()
    later = asyncio.ensure_future(threads.run(noted(order, "later")))
    other = asyncio.ensure_future(threads.run(noted(order, "other"), tenant="other"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not order
    leave.set()
    await asyncio.gather(later, other)
    threads.close()


async def test_a_full_queue_and_an_end_are_errors() -> None:
    threads = FairThreads("test", size=1, max_queued=1)
    with busy(threads):
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(threads.run(int))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await threads.run(int)
        threads.close()  # while a job runs and another waits
        with pytest.raises(WorkerError):
            await waiting
        with pytest.raises(WorkerError):
            await threads.run(int)
