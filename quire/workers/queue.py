"""Jobs that wait for a worker, in the order in which tenants take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Any

from quire.workers.errors import QueueFull


class Job:
    """A job and where its result goes."""

    __slots__ = ("content", "repeated", "result", "tenant")

    def __init__(self, content: Any, tenant: str) -> None:
        self.content = content
        self.tenant = tenant
        self.repeated = False
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def succeed(self, value: Any) -> None:
        """End with a result, if it has not ended."""
        if not self.result.done():
            self.result.set_result(value)

    def fail(self, error: BaseException) -> None:
        """End with an exception, if it has not ended."""
        if not self.result.done():
            self.result.set_exception(error.with_traceback(None))


class TenantQueue:
    """First in, first out for each tenant; tenants take turns."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by tenant; the first one's turn is next
        self._count = 0
        self._takers: deque[asyncio.Future[Job]] = deque()  # workers without a job

    def __len__(self) -> int:
        return self._count

    def put(self, job: Job) -> None:
        """Add a job, or hand it to a worker that waits for one.

        Raises:
            QueueFull: as many jobs wait as may.
        """
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(job)
                return
        if self._count >= self._max_queued:
            raise QueueFull(f"{self._count} requests wait already")
        self._waiting.setdefault(job.tenant, deque()).append(job)
        self._count += 1

    async def get(self) -> Job:
        """The next job; waits for one."""
        if self._count:
            return self._pop()
        taker: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        return await taker

    def get_nowait(self) -> Job | None:
        """The next job; None if none waits."""
        return self._pop() if self._count else None

    def heads(self) -> list[Job]:
        """The next job of each tenant, in the order of their turns."""
        return [jobs[0] for jobs in self._waiting.values()]

    def take(self, job: Job) -> None:
        """Remove a job, one of `heads`; the next turn of its tenant comes after those of all others."""
        self.discard(job)
        if job.tenant in self._waiting:
            self._waiting.move_to_end(job.tenant)

    def discard(self, job: Job) -> None:
        """Remove a job if it waits."""
        jobs = self._waiting.get(job.tenant)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            self._count -= 1
            if not jobs:
                del self._waiting[job.tenant]

    def _pop(self) -> Job:
        job = next(iter(self._waiting.values()))[0]
        self.take(job)
        return job
