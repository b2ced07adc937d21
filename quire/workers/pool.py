"""A pool of worker processes: jobs wait in a fair queue, and a job beyond its limits ends only its own process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from quire.workers.child import Setup
from quire.workers.errors import Cause, JobKilled, QueueFull, WorkerError
from quire.workers.limits import WorkerLimits
from quire.workers.process import WorkerProcess
from quire.workers.queue import Job, TenantQueue

logger = logging.getLogger(__name__)
_CLOSE_SECONDS = 10.0
_BUSY_PATIENCE = 3  # real time that a job gets for its processor time before it counts as a long one


class WorkerPool:
    """Run jobs in processes that are replaced when a job ends them. For one event loop.

    The first process starts with the pool, and each other one when jobs wait and all processes have one.

    A job that takes more than `patience` continues with low priority, and another process takes the place of its own,
    so that long jobs do not block short ones. There are at most `size` of these; further long jobs start again when
    one of them has ended.
    """

    def __init__(
        self,
        name: str,
        target: str,
        arguments: tuple[Any, ...],
        limits: WorkerLimits,
        *,
        size: int = 2,
        max_queued: int = 64,
        share: float = 1.0,
        patience: float = 0.5,
        cancelled_seconds: float = 0.0,
    ) -> None:
        """Prepare a pool; its first job starts a process.

        Args:
            name: name in log lines and thread names.
            target: "package.module:factory". The factory is called once in each worker, and returns the function that
                does jobs. Its module should be quick to import.
            arguments: arguments of the factory.
            limits: limits of each job.
            size: most processes for short jobs, and most with long ones.
            max_queued: jobs that may wait for a process.
            share: the largest part of these for one tenant; see `Shares`.
            patience: seconds of processor time after which a job is a long one. On a busy machine, where it gets a part
                of a processor, it is one after some times as many seconds at the latest.
            cancelled_seconds: for which a running job may go on when its caller is cancelled, who waits for it. Worth
                it for processes that take longer to start than most jobs do.
        """
        self._name = name
        self._setup = Setup(target, arguments, limits)
        self._size = size
        self._max_queued = max_queued
        self._patience = patience
        self._cancelled_seconds = cancelled_seconds
        self._queue = TenantQueue(max_queued, share)
        self._long = asyncio.Semaphore(size)
        self._long_waiting = 0
        self._threads = ThreadPoolExecutor(1, f"quire-{name}-spawn")  # starts processes and waits for their ends
        self._tasks: set[asyncio.Task[None]] = set()  # one for each process
        self._jobs: dict[Job, WorkerProcess | None] = {}  # all that have not ended, with the process of running ones
        self._processes = self._busy = 0  # those for short jobs, ready or not; those of them that have a job
        self._closed = False

    def start(self) -> None:
        """Start a process in the background, so that the first job finds it ready."""
        if not self._processes and not self._closed:
            self._add_process()

    async def run(self, job: Any, *, tenant: str = "") -> Any:
        """Do a job in a worker process.

        When the calling task is cancelled, a waiting job is dropped and the process of a running one is killed; see
        `cancelled_seconds`.

        Args:
            job: the argument of the function that does jobs. It is pickled on the event loop, so large ones should be
                bytes or text.
            tenant: the tenant that waits for the job; tenants take turns.

        Returns:
            The function's result. An exception of the function is raised.

        Raises:
            QueueFull: too many jobs wait.
            JobTimedOut: the job took too long.
            JobKilled: the job's process has ended: memory, stack or a crash.
            WorkerError: the pool is closed, or the processes cannot be started.
        """
        if self._closed:
            raise WorkerError(f"the worker pool {self._name} is closed")
        self.start()
        entry = Job(job, tenant)
        self._queue.put(entry)
        if self._processes < self._size and len(self._queue) > self._processes - self._busy:
            self._add_process()
        self._jobs[entry] = None
        try:
            return await self._result(entry)
        finally:
            self._queue.discard(entry)
            worker = self._jobs.pop(entry)
            if worker is not None:  # the caller was cancelled, or the pool is closed
                worker.kill()
            del entry  # its exception refers to this frame; a cycle would keep the job's content for long

    async def _result(self, entry: Job) -> Any:
        """The result of a job. A cancelled caller waits for a running one for a moment."""
        try:
            if not self._cancelled_seconds:
                return await entry.result
            try:
                return await asyncio.shield(entry.result)
            except asyncio.CancelledError:
                try:
                    if self._jobs[entry] is not None:
                        await asyncio.wait({entry.result}, timeout=self._cancelled_seconds)
                finally:
                    entry.result.cancel()  # so that it is not begun, or begun again
                raise
        finally:
            del entry  # as in `run`

    async def close(self) -> None:
        """Kill the processes; jobs that have not ended fail. Takes a few seconds at most."""
        self._closed = True
        for entry in self._jobs:
            entry.fail(WorkerError(f"the worker pool {self._name} is closed"))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)
        self._threads.shutdown(wait=False)

    def _add_process(self) -> None:
        self._processes += 1
        self._spawn(self._serve())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"quire-{self._name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self) -> None:
        """Keep one process and give it jobs, until one of them is a long job, which keeps the process."""
        entry: Job | None = None
        while True:
            try:
                worker = await WorkerProcess.start(self._setup, self._threads)
            except Exception as error:  # noqa: BLE001 error boundary: with a job to report to, starting is tried once more
                logger.warning("a worker process of %s could not be started: %s", self._name, error)
                if entry is not None:
                    entry.fail(error)
                entry = await self._queue.get()
                continue
            try:
                while worker.usable:
                    entry = entry or await self._queue.get()
                    if worker.usable:  # it may have ended meanwhile
                        if await self._do(worker, entry):
                            return
                        entry = None
            finally:
                await worker.end(self._threads)

    async def _do(self, worker: WorkerProcess, entry: Job) -> bool:
        """Do a job; returns whether it was a long one and another process has taken this one's place."""
        used = worker.processor_seconds()
        latest = asyncio.get_running_loop().time() + _BUSY_PATIENCE * self._patience
        working = asyncio.create_task(self._finish(worker, entry))
        is_replaced = False
        self._busy += 1
        try:
            while not (await asyncio.wait({working}, timeout=self._patience))[0]:
                is_late = asyncio.get_running_loop().time() > latest
                if not is_late and worker.processor_seconds() - used < self._patience:
                    continue
                if not self._long.locked():
                    break
                if len(self._queue):
                    self._start_again(worker, entry)
                    return False
            else:
                return False
            async with self._long:  # not locked: does not wait
                is_replaced = True
                self._busy -= 1
                self._spawn(self._serve())
                worker.lower_priority()
                await asyncio.wait({working})
            return True
        finally:
            if not is_replaced:
                self._busy -= 1
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working

    def _start_again(self, worker: WorkerProcess, entry: Job) -> None:
        """Let a long job, which keeps others waiting, wait for the end of another long one."""
        if self._jobs.get(entry) is worker:
            self._jobs[entry] = None
            worker.kill()
            if self._long_waiting < self._max_queued:
                self._spawn(self._do_long(entry))
            else:
                entry.fail(QueueFull(f"{self._long_waiting} long requests wait already"))

    async def _do_long(self, entry: Job) -> None:
        self._long_waiting += 1
        try:
            await self._long.acquire()
        finally:
            self._long_waiting -= 1
        try:
            if entry.result.done():
                return
            worker = await WorkerProcess.start(self._setup, self._threads)
            try:
                worker.lower_priority()
                await self._finish(worker, entry)
            finally:
                await worker.end(self._threads)
        except Exception as error:  # noqa: BLE001 error boundary: `run` raises it
            entry.fail(error)
        finally:
            self._long.release()

    def _repeated(self, entry: Job, error: Exception) -> bool:
        """Let a job whose process was killed from outside wait for another one, once."""
        if entry.repeated or not isinstance(error, JobKilled) or error.cause is not Cause.KILLED:
            return False
        entry.repeated = True
        with suppress(QueueFull):
            self._queue.put(entry)
            return True
        return False

    async def _finish(self, worker: WorkerProcess, entry: Job) -> None:
        """Do a job to its end."""
        if entry.result.done():
            return
        self._jobs[entry] = worker
        try:
            entry.succeed(await worker.run(entry.content))
        except Exception as error:  # noqa: BLE001 error boundary: `run` raises it
            if self._jobs.get(entry) is worker and not self._repeated(entry, error):  # else it starts again elsewhere
                entry.fail(error)
        finally:
            if self._jobs.get(entry) is worker:
                self._jobs[entry] = None
