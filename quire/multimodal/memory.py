"""The memory that media take: reserved before a file is read or decoded, held for as long as the bytes live."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import suppress
from typing import Protocol, Self

from quire.multimodal.errors import PromptError
from quire.workers.errors import QueueFull, ShareExceeded
from quire.workers.queue import Job, TenantQueue
from quire.workers.shares import Shares

_PARAM = "file"  # the field that errors name by default
_PATIENCE = 120.0  # seconds that a request waits for memory
_RETRY_AFTER = 10  # seconds
_LEFT = 4  # 1 / _LEFT of the memory stays free for those who wait, when somebody takes some without waiting


class Spare(Protocol):
    """Holds memory that it can do without."""

    def forget(self) -> None:
        """Give back the memory."""


class MediaMemory:
    """Count the bytes that are reserved for all media of a server. For one event loop.

    Who wants more than its share waits until it holds less, or others do. Tenants take turns. One that waits for its
    own bytes is passed over by others; one that holds nothing is not.

    Spares hold bytes of what could be made again. They forget it before anybody waits, so a request may hold some of
    them while it waits.
    """

    def __init__(self, limit: int, share: float = 1.0, *, max_waiting: int = 1024, patience: float = _PATIENCE) -> None:
        """Begin with nothing reserved.

        Args:
            limit: bytes in all.
            share: the largest part of these, and of the places of those who wait, for one tenant; see `Shares`.
            max_waiting: requests that may wait.
            patience: seconds that each of them waits.
        """
        self._bytes = Shares(limit, share)
        self._patience = patience
        self._waiting = TenantQueue(max_waiting, share)
        self._spares: set[Spare] = set()

    @property
    def limit(self) -> int:
        """Bytes that may be reserved in all."""
        return self._bytes.capacity

    @property
    def most(self) -> int:
        """Bytes that a tenant may hold that is alone."""
        return self._bytes.most

    @property
    def held(self) -> int:
        """Bytes that are reserved now."""
        return self._bytes.used

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    async def reserve(self, size: int, tenant: str, where: str = _PARAM) -> Reservation:
        """Reserve memory, as soon as it is this tenant's turn and there is room.

        Args:
            size: number of bytes.
            tenant: the tenant that will hold them.
            where: the field or content part that needs it, for the error if it can never fit.

        Raises:
            PromptError: it is more than the tenant may ever hold.
            QueueFull: there has been no room for too long, or too many requests wait.
            ShareExceeded: this is because of what the tenant holds itself.
        """
        if size > self.most:
            raise PromptError(
                f"The media need up to {size} bytes of memory while they are prepared; this server has {self.limit} "
                f"for all media (--max-media-memory), of which one client may have {self.most} (--max-client-share).",
                where,
            )
        if not self.has_room(size, tenant):
            self._forget_spares()
        if self.has_room(size, tenant):
            return Reservation(self, tenant, size)
        job = Job(size, tenant)
        self._waiting.put(job)
        self._grant()  # those before it may wait for their own memory only
        try:
            async with asyncio.timeout(self._patience):
                reservation: Reservation = await job.result
        except BaseException as error:
            self._waiting.take(job)  # so that others have their turn before its tenant has the next one
            if job.result.done() and not job.result.cancelled():
                job.result.result().close()
            self._grant()
            if isinstance(error, TimeoutError):
                raise self._in_vain(size, tenant) from error
            raise
        return reservation

    def has_room(self, size: int, tenant: str) -> bool:
        """Whether a tenant need not wait for memory."""
        return not len(self._waiting) and self._bytes.refusal(tenant, size) is None

    def add_spare(self, spare: Spare) -> None:
        """Let something forget what it holds before anybody waits, until it is removed."""
        self._spares.add(spare)

    def remove_spare(self, spare: Spare) -> None:
        """Let something forget nothing any more."""
        self._spares.discard(spare)

    def take(self, size: int, tenant: str) -> Reservation:
        """Reserve memory without waiting, for media that have to be taken as they come.

        Raises:
            QueueFull: there is no room, or the tenant has its share.
        """
        self.check(size, tenant)
        return Reservation(self, tenant, size)

    def check(self, size: int, tenant: str) -> None:
        """Check that memory can be taken without waiting.

        Raises:
            QueueFull: there is no room, or the tenant has its share.
        """
        if self._shortage(size, tenant) is not None:
            self._forget_spares()
        if (error := self._shortage(size, tenant)) is not None:
            raise error

    def add(self, size: int, tenant: str) -> None:
        """Hold more bytes for a tenant, or fewer."""
        if size > 0:
            self._bytes.take(tenant, size)
        elif size < 0:
            self._bytes.give_back(tenant, -size)
            self._grant()

    def _shortage(self, size: int, tenant: str) -> QueueFull | None:
        """Why memory cannot be taken without waiting; None if it can."""
        if self._bytes.refusal(tenant, size) == "share":
            return self._beyond_share(size, tenant)
        return self._full(size) if self.held + size > self.limit - self.limit // _LEFT else None

    def _forget_spares(self) -> None:
        for spare in self._spares:
            spare.forget()

    def _grant(self) -> None:
        """Give memory to those whose turn it is. A tenant that holds nothing is not overtaken."""
        while (job := self._next()) is not None:
            self._waiting.take(job)
            if not job.result.done():
                job.succeed(Reservation(self, job.tenant, job.content))

    def _next(self) -> Job | None:
        for job in self._waiting.heads():
            if job.result.done() or self._bytes.refusal(job.tenant, job.content) is None:
                return job
            if not self._bytes.held(job.tenant):
                return None
        return None

    def _in_vain(self, size: int, tenant: str) -> QueueFull:
        """The error of a request that has waited for too long, maybe behind others of its tenant."""
        reason = self._bytes.refusal(tenant, size)
        behind_its_own = reason is None and self._bytes.held(tenant) > 0
        return self._beyond_share(size, tenant) if reason == "share" or behind_its_own else self._full(size)

    def _full(self, size: int) -> QueueFull:
        return QueueFull(
            f"its media need {size} bytes of memory, and of the {self.limit} bytes of --max-media-memory "
            f"{self.held} are taken",
            retry_after=_RETRY_AFTER,
        )

    def _beyond_share(self, size: int, tenant: str) -> ShareExceeded:
        return ShareExceeded(
            f"its media need {size} bytes of memory, and other requests of this client hold "
            f"{self._bytes.held(tenant)} of the {self._bytes.limit(tenant)} bytes that it may have at the moment "
            "(--max-client-share of --max-media-memory), or wait for them",
            retry_after=_RETRY_AFTER,
        )


class Reservation:
    """Bytes that are held until the context ends, or until the objects have gone to which they were passed on.

    Attributes:
        size: number of bytes.
    """

    def __init__(self, memory: MediaMemory, tenant: str, size: int) -> None:
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
        added = size - self.size
        self.size = size
        if added:
            self._memory.add(added, self._tenant)

    def grow(self, size: int) -> None:
        """Hold `size` more bytes without waiting; see `MediaMemory.take`.

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
