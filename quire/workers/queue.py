"""Jobs that wait for a worker, in the order in which tenants take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Any

from quire.workers.errors import QueueFull, ShareExceeded
from quire.workers.shares import Shares


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

    def __init__(self, max_queued: int, share: float = 1.0) -> None:
        """`share`: the largest part of the queue for one tenant; see `Shares`."""
        self._places = Shares(max_queued, share)
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by tenant; the first one's turn is next
        self._takers: deque[asyncio.Future[Job]] = deque()  # workers without a job

    def __len__(self) -> int:
        return self._places.used

    def put(self, job: Job) -> None:
        """Add a job, or hand it to a worker that waits for one.

        Raises:
            QueueFull: as many jobs wait as may, of all tenants or of this one.
        """
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(job)
                return
        match self._places.refusal(job.tenant):
            case "full":
                raise QueueFull(f"{len(self)} requests wait already")
            case "share":
                raise ShareExceeded(
                    f"{self._places.held(job.tenant)} requests of this client wait already (--max-client-share)"
                )
        self._waiting.setdefault(job.tenant, deque()).append(job)
        self._places.take(job.tenant)

    async def get(self) -> Job:
        """The next job; waits for one."""
        if len(self):
            return self._pop()
        taker: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        return await taker

    def get_nowait(self) -> Job | None:
        """The next job; None if none waits."""
        return self._pop() if len(self) else None

    def heads(self) -> list[Job]:
        """The next job of each tenant, in the order of their turns."""
        return [jobs[0] for jobs in self._waiting.values()]

    def take(self, job: Job) -> None:
        """Remove a job if it waits; the next turn of its tenant comes after those of all others."""
        self.discard(job)
        if job.tenant in self._waiting:
            self._waiting.move_to_end(job.tenant)

    def discard(self, job: Job) -> None:
        """Remove a job if it waits."""
        jobs = self._waiting.get(job.tenant)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            self._places.give_back(job.tenant)
            if not jobs:
                del self._waiting[job.tenant]

    def _pop(self) -> Job:
        job = next(iter(self._waiting.values()))[0]
        self.take(job)
        return job
