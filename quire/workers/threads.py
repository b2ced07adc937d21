"""A few threads for jobs that are certain to be short, whose tenants take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.workers.errors import WorkerError
from quire.workers.queue import Job, TenantQueue

Result = TypeVar("Result")


class FairThreads:
    """Run functions in threads. For one event loop."""

    def __init__(self, name: str, *, size: int = 2, max_queued: int = 64, share: float = 1.0) -> None:
        """Prepare threads; the first job starts one.

        Args:
            name: name in thread names.
            size: number of threads.
            max_queued: jobs that may wait for a thread.
            share: the largest part of these for one tenant; see `Shares`.
        """
        self._name = name
        self._executor = ThreadPoolExecutor(size, f"quire-{name}")
        self._free = size
        self._queue = TenantQueue(max_queued, share)
        self._closed = False

    async def run(self, work: Callable[[], Result], *, tenant: str = "") -> Result:
        """Call a function in a thread and return its result. A waiting call is dropped if its task is cancelled.

        Args:
            work: the function.
            tenant: the tenant that waits for it; tenants take turns.

        Raises:
            QueueFull: too many jobs wait.
            WorkerError: the threads are closed.
        """
        if self._closed:
            raise WorkerError(f"the threads of {self._name} have ended")
        await self._turn(tenant)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        except RuntimeError as error:  # closed meanwhile
            raise WorkerError(f"the threads of {self._name} have ended") from error
        running.add_done_callback(lambda _: self._release())  # also if the caller has gone
        return await asyncio.shield(running)

    def close(self) -> None:
        """End the threads; waiting jobs fail. A job that runs is not waited for."""
        self._closed = True
        while (job := self._queue.get_nowait()) is not None:
            job.fail(WorkerError(f"the threads of {self._name} have ended"))
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: str) -> None:
        """Wait for a free thread."""
        if self._free:
            self._free -= 1
            return
        job = Job(None, tenant)
        self._queue.put(job)
        try:
            await job.result
        except asyncio.CancelledError:
            self._queue.discard(job)
            if not job.result.cancelled():  # its turn had come
                self._release()
            raise

    def _release(self) -> None:
        """Give a thread to the next job."""
        while (job := self._queue.get_nowait()) is not None:
            if not job.result.done():
                job.succeed(None)
                return
        self._free += 1
