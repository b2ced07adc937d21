"""Worker pools: a job beyond its limits ends only its own process, and jobs take turns."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from quire.workers.errors import Cause, JobKilled, JobTimedOut, QueueFull, WorkerError
from quire.workers.limits import WorkerLimits
from quire.workers.pool import WorkerPool

LIMITS = WorkerLimits(memory=256 << 20, seconds=0.3, stack=4 << 20)


@asynccontextmanager
async def running_pool(
    target: str = "factory", arguments: tuple[Any, ...] = (), limits: WorkerLimits = LIMITS, **options: Any
) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool("test", f"tests.workers.jobs:{target}", arguments, limits, **{"size": 1, **options})
    try:
        yield pool
    finally:
        async with asyncio.timeout(60):
            await pool.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def ended(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def mapping_of(array: Any) -> str:
    """The line of the system's table of mappings about an array's memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= array.ctypes.data < int(end, 16):
            return line
    raise LookupError(array.ctypes.data)


async def test_results_and_exceptions_of_jobs() -> None:
    async with running_pool(arguments=("a ",)) as pool:
        assert await pool.run(("echo", "result")) == "a result"
        with pytest.raises(LookupError, match="not there"):
            await pool.run(("fail", "not there"))
        with pytest.raises(Exception, match="local"):
            await pool.run(("local function", None))
        assert await pool.run(("echo", "second")) == "a second"


async def test_large_arrays_arrive_whole_and_do_not_hold_the_event_loop() -> None:
    # Writing 40 MB takes longer where the event loop that reads them has the processor.
    async with running_pool(limits=replace(LIMITS, seconds=5.0)) as pool:
        small = await pool.run(("array", 10))
        assert small.tolist() == list(range(10))
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        large = await pool.run(("array", 40 << 20 >> 2))
        counting.cancel()
        assert np.array_equal(large, np.arange(40 << 20 >> 2, dtype=np.float32))
        assert turns > 30  # it is read a megabyte at a time
        large += 1  # it is writable, as any array
        # Shared memory would be freed page by page: an hour of audio for 50 ms, in which the event loop waits.
        assert mapping_of(large).split()[1].endswith("p")  # private


@pytest.mark.parametrize(
    ("job", "cause"),
    [
        (("allocate", 1 << 30), Cause.MEMORY),
        (("recurse", None), Cause.STACK),
        (("exit", 3), Cause.CRASH),
        (("spin", None), None),
    ],
)
async def test_a_job_beyond_its_limits_ends_only_its_own_process(job: tuple[str, Any], cause: Cause | None) -> None:
    async with running_pool(size=2) as pool:
        others = [asyncio.create_task(pool.run(("echo", number))) for number in range(5)]
        with pytest.raises(WorkerError) as caught:
            await pool.run(job)
        if cause is None:
            assert isinstance(caught.value, JobTimedOut)
        else:
            assert isinstance(caught.value, JobKilled)
            assert caught.value.cause is cause
        assert await asyncio.gather(*others) == list(range(5))
        assert await pool.run(("echo", "again")) == "again"


async def test_large_payloads_do_not_block_the_event_loop() -> None:
    payload = bytes(16 << 20)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    async with running_pool(limits=WorkerLimits(1 << 30, 10, 4 << 20)) as pool:
        await pool.run(("echo", b""))
        ticking = asyncio.create_task(tick())
        assert await pool.run(("echo", payload)) == payload
        ticking.cancel()
    assert ticks > 20


async def test_tenants_take_turns() -> None:
    async with running_pool() as pool:
        order: list[str] = []

        async def run(name: str, tenant: str) -> None:
            await pool.run(("echo", name), tenant=tenant)
            order.append(name)

        await asyncio.gather(
            *(run(f"a{number}", "a") for number in range(5)), *(run(f"b{number}", "b") for number in range(2))
        )
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]


async def test_a_full_queue_refuses_jobs() -> None:
    async with running_pool(max_queued=3) as pool:
        waiting = [asyncio.create_task(pool.run(("echo", number))) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await pool.run(("echo", "too many"))
        assert await asyncio.gather(*waiting) == [0, 1, 2]
        assert await pool.run(("echo", "room again")) == "room again"


async def test_long_jobs_do_not_block_short_ones() -> None:
    limits = WorkerLimits(256 << 20, 30, 4 << 20)
    async with running_pool(limits=limits, patience=0.02) as pool:
        long = [asyncio.create_task(pool.run(("spin", number))) for number in range(4)]
        for number in range(10):
            assert await pool.run(("echo", number)) == number
        assert not any(task.done() for task in long)
        for task in long:
            task.cancel()
        await asyncio.wait(long)


async def test_time_without_a_processor_makes_no_long_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.workers.pool._BUSY_PATIENCE", 1e6)
    async with running_pool(patience=0.02) as pool:
        pid = await pool.run(("pid", None))
        await pool.run(("sleep", 0.1))
        assert await pool.run(("pid", None)) == pid  # that of a long job is replaced


async def test_another_process_starts_when_all_have_jobs(tmp_path: Path) -> None:
    limits = WorkerLimits(256 << 20, 60, 4 << 20)
    async with running_pool(limits=limits, size=2, patience=60.0) as pool:
        first = await pool.run(("pid", None))
        spinning = asyncio.create_task(pool.run(("announce", (tmp_path / "begun", ("spin", None)))))
        await until((tmp_path / "begun").exists)
        assert await pool.run(("pid", None)) != first
        assert not spinning.done()
        spinning.cancel()
        await asyncio.wait([spinning])


async def test_long_jobs_all_come_to_an_end() -> None:
    async with running_pool(patience=0.02) as pool:
        await asyncio.gather(*(pool.run(("sleep", 0.2)) for _ in range(4)))
        assert await pool.run(("echo", "last")) == "last"


async def test_cancelling_a_job_kills_its_process(tmp_path: Path) -> None:
    async with running_pool(limits=WorkerLimits(256 << 20, 60, 4 << 20)) as pool:
        pid = await pool.run(("pid", None))
        spinning = asyncio.create_task(pool.run(("announce", (tmp_path / "begun", ("spin", None)))))
        await until((tmp_path / "begun").exists)
        spinning.cancel()
        await asyncio.wait([spinning])
        await until(lambda: ended(pid))
        assert await pool.run(("pid", None)) != pid


async def test_a_cancelled_job_may_end_where_processes_start_slowly(tmp_path: Path) -> None:
    limits = WorkerLimits(1 << 30, 60, 4 << 20)
    async with running_pool(limits=limits, cancelled_seconds=60.0, patience=60.0) as pool:
        pid = await pool.run(("pid", None))
        making = asyncio.create_task(pool.run(("announce", (tmp_path / "begun", ("array", 10)))))
        waiting = asyncio.create_task(pool.run(("exit", 3)))
        await until((tmp_path / "begun").exists)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not making.done()
        making.cancel()
        await asyncio.wait([making])
        assert making.cancelled()
        assert await pool.run(("pid", None)) == pid


async def test_a_cancelled_job_is_given_so_much_time_only(tmp_path: Path) -> None:
    async with running_pool(limits=WorkerLimits(256 << 20, 60, 4 << 20), cancelled_seconds=0.01) as pool:
        pid = await pool.run(("pid", None))
        spinning = asyncio.create_task(pool.run(("announce", (tmp_path / "begun", ("spin", None)))))
        await until((tmp_path / "begun").exists)
        spinning.cancel()
        await asyncio.wait([spinning])
        await until(lambda: ended(pid))
        assert await pool.run(("pid", None)) != pid


async def test_closing_fails_what_has_not_ended() -> None:
    async with running_pool() as pool:
        pid = await pool.run(("pid", None))
        tasks = [asyncio.create_task(pool.run(("spin", None))) for _ in range(3)]
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await pool.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, WorkerError) for result in results)
        assert ended(pid)
        with pytest.raises(WorkerError, match="closed"):
            await pool.run(("echo", 1))


async def test_a_factory_that_fails() -> None:
    async with running_pool("broken") as pool:
        with pytest.raises(ValueError, match="nothing to work with"):
            await pool.run(("echo", 1))


async def test_a_process_that_was_killed_while_idle_is_replaced() -> None:
    async with running_pool() as pool:
        pid = await pool.run(("pid", None))
        os.kill(pid, signal.SIGKILL)
        await until(lambda: ended(pid))
        assert await pool.run(("echo", "still here")) == "still here"


async def test_a_job_whose_process_was_killed_by_others_is_done_once_more(tmp_path: Path) -> None:
    async with running_pool(size=2) as pool:
        with pytest.raises(JobKilled) as caught:
            await pool.run(("kill", tmp_path / "started"))
        assert caught.value.cause is Cause.KILLED
        (tmp_path / "second").write_text(".")
        assert await pool.run(("kill", tmp_path / "second")) == "done"


async def test_processes_ignore_signals_and_inherit_no_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.set_inheritable(True)
        async with running_pool() as pool:
            pid = await pool.run(("pid", None))
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
            assert len(await pool.run(("sockets", None))) == 1  # to the server
            assert await pool.run(("pid", None)) == pid


_SERVER = """
import asyncio, sys
from quire.workers.limits import WorkerLimits
from quire.workers.pool import WorkerPool

async def main():
    pool = WorkerPool("test", "tests.workers.jobs:factory", (), WorkerLimits(1 << 28, 100, 4 << 20), size=1)
    print(await pool.run(("pid", None)), flush=True)
    await (pool.run(("spin", None)) if sys.argv[1] == "busy" else asyncio.sleep(100))

asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_processes_end_with_the_server(state: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", _SERVER, state], stdout=subprocess.PIPE, env=environment) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        if state == "busy":
            asyncio.run(until(lambda: psutil.Process(pid).cpu_times().user > 0.2))
        server.kill()
    asyncio.run(until(lambda: ended(pid)))
