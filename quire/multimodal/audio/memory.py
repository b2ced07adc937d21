"""The memory that audio takes: reserved before a file is read or decoded, held for as long as the bytes live."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from contextlib import suppress
from typing import Self

from quire.multimodal.audio.decode import AudioError
from quire.workers.errors import QueueFull
from quire.workers.queue import Job, TenantQueue

_PATIENCE = 120.0  # seconds that a request waits for memory
_RETRY_AFTER = 10  # seconds
_LEFT = 4  # a share of 1 / _LEFT stays free for those who wait, when somebody takes memory without waiting


class AudioMemory:
    """Counts the bytes that are reserved for all audio of a server. For one event loop.

    Tenants take turns. A tenant that holds something may hold as much as all tenants leave free, so at most half; one
    that holds nothing may take all that is free.
    """

    def __init__(self, limit: int, *, max_waiting: int = 1024, patience: float = _PATIENCE) -> None:
        """`limit`: bytes in all. `max_waiting`: requests that may wait. `patience`: seconds that each of them waits."""
        self.limit = limit
        self._patience = patience
        self._held: Counter[str] = Counter()
        self._waiting = TenantQueue(max_waiting)

    @property
    def held(self) -> int:
        """Bytes that are reserved now."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    async def reserve(self, size: int, tenant: str) -> Reservation:
        """Reserve memory, as soon as it is this tenant's turn and there is room.

        Args:
            size: number of bytes.
            tenant: the tenant that will hold them.

        Raises:
            AudioError: it is more than there can ever be.
            QueueFull: there has been no room for too long, or too many requests wait.
        """
        if size > self.limit:
            raise AudioError(
                f"The audio needs up to {size} bytes of memory while it is prepared; this server has {self.limit} for "
                "all audio (--max-audio-memory)."
            )
        if not len(self._waiting) and self._fits(size, tenant):
            return Reservation(self, tenant, size)
        job = Job(size, tenant)
        try:
            self._waiting.put(job)
        except QueueFull as error:
            raise self._full(size) from error
        self._grant()  # those before it may wait for their own memory only
        try:
            async with asyncio.timeout(self._patience):
                reservation: Reservation = await job.result
        except BaseException as error:
            self._waiting.discard(job)
            if job.result.done() and not job.result.cancelled():
                job.result.result().close()
            self._grant()
            if isinstance(error, TimeoutError):
                raise self._full(size) from error
            raise
        return reservation

    def take(self, size: int, tenant: str) -> Reservation:
        """Reserve memory without waiting, for audio that has to be taken as it comes.

        Raises:
            QueueFull: there is no room.
        """
        self.check(size, tenant)
        return Reservation(self, tenant, size)

    def check(self, size: int, tenant: str) -> None:
        """Check that memory can be taken without waiting.

        Raises:
            QueueFull: there is no room.
        """
        if not self._fits(size + self.limit // _LEFT, tenant):
            raise self._full(size)

    def add(self, size: int, tenant: str) -> None:
        """Hold more bytes for a tenant, or fewer."""
        self._held[tenant] += size
        if not self._held[tenant]:
            del self._held[tenant]
        if size < 0:
            self._grant()

    def _fits(self, size: int, tenant: str) -> bool:
        free = self.limit - self.held
        return size <= free and (not self._held[tenant] or self._held[tenant] + size <= free)

    def _grant(self) -> None:
        """Give memory to those whose turn it is. A tenant that holds nothing is not overtaken."""
        while (job := self._next()) is not None:
            self._waiting.take(job)
            if not job.result.done():
                job.succeed(Reservation(self, job.tenant, job.content))

    def _next(self) -> Job | None:
        for job in self._waiting.heads():
            if job.result.done() or self._fits(job.content, job.tenant):
                return job
            if not self._held[job.tenant]:
                return None
        return None

    def _full(self, size: int) -> QueueFull:
        return QueueFull(
            f"its audio needs {size} bytes of memory, and of the {self.limit} bytes of --max-audio-memory "
            f"{self.held} are taken",
            retry_after=_RETRY_AFTER,
        )


class Reservation:
    """Bytes that are held until the context ends, or until the objects have gone to which they were passed on.

    Attributes:
        size: number of bytes.
    """

    def __init__(self, memory: AudioMemory, tenant: str, size: int) -> None:
        self._memory = memory
        self._tenant = tenant
        self.size = size
        memory.add(size, tenant)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def resize(self, size: int) -> None:
        """Hold another number of bytes from now on."""
        added, self.size = size - self.size, size
        if added:
            self._memory.add(added, self._tenant)

    def grow(self, size: int) -> None:
        """Hold `size` more bytes without waiting; see `AudioMemory.take`.

        Raises:
            QueueFull: there is no room.
        """
        self._memory.check(size, self._tenant)
        self.resize(self.size + size)

    def close(self) -> None:
        """Give all bytes back."""
        self.resize(0)

    def pass_on(self, owner: object, size: int) -> None:
        """Hold `size` of the bytes for as long as an object lives, and no longer in this reservation.

        The object may be freed in any thread.
        """
        part = Reservation(self._memory, self._tenant, size)
        self.resize(max(0, self.size - size))
        loop = asyncio.get_running_loop()
        weakref.finalize(owner, _close_in, loop, part).atexit = False


def _close_in(loop: asyncio.AbstractEventLoop, part: Reservation) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(part.close)
