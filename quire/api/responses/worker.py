"""Worker threads for the database of responses: a bounded queue, time limits, and periodic checks."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from quire.api.responses.errors import StoreBlocked, StoreFailed, StoreShareExceeded, TooLargeToStore
from quire.workers.shares import Shares
from quire.workers.tenant import current_tenant

if TYPE_CHECKING:
    from quire.api.responses.database import Database

logger = logging.getLogger(__name__)
T = TypeVar("T")
Kind = Literal["read", "write", "check"]

# Threads of each kind: readers of SQLite need not wait for writers, and checks need not wait for either.
_THREADS: dict[Kind, int] = {"read": 2, "write": 2, "check": 1}
_MAX_WAITING = 256  # operations of each kind, including those that run
_TIMEOUT = 15.0  # timeout of an operation in seconds
_CHECK_SECONDS = 5.0
_SWEEP_SECONDS = 60.0
_CLOSE_SECONDS = 2.0  # for operations that are under way when the server stops


class DatabaseWorker:
    """Run operations on a database in threads, and open it again if it was replaced or could not be used.

    Attributes:
        problem: the reason why the last operation or check failed; None if the database works.
    """

    def __init__(self, open_database: Callable[[], Database], share: float = 1.0) -> None:
        """Prepare threads; the first operation opens the database. `share`: of waiting operations for one tenant."""
        self.problem: str | None = None
        self._open_database = open_database
        self._open_lock = threading.Lock()
        self._database: Database | None = None
        self._pools = {kind: ThreadPoolExecutor(count, f"quire-store-{kind}") for kind, count in _THREADS.items()}
        self._places = {kind: Shares(_MAX_WAITING, share) for kind in _THREADS}
        self._running: set[asyncio.Future[Any]] = set()
        self._refusal: str | None = None  # why writing is not tried: the last check failed, or a lock was waited for
        self._maintenance: asyncio.Task[None] | None = None
        self._closed = False

    async def run(self, work: Callable[[Database], T], *, write: bool) -> T:
        """The result of an operation. `write`: it changes something.

        Raises:
            StoreFailed: the database cannot be used. While checks fail, writing fails at once.
        """
        kind: Kind = "write" if write else "read"
        self._check_refused(kind)
        self.start_maintenance()
        try:
            return await self._submit(work, kind)
        except (TooLargeToStore, StoreShareExceeded):
            raise
        except StoreFailed as error:
            if not self._closed:
                self._note(error)
            raise

    async def check(self) -> None:
        """Open the database, and check that it can be written.

        Raises:
            StoreFailed: it cannot be used.
        """
        await self._submit(lambda database: database.check(write=True), "check")
        self.start_maintenance()

    def start_maintenance(self) -> None:
        """Open the database in the background, check it again and again, and delete what has expired."""
        if self._maintenance is None and not self._closed:
            self._maintenance = asyncio.create_task(self._maintain())

    async def aclose(self) -> None:
        """Give running operations two seconds to finish, then close the database. Further operations fail."""
        self._closed = True
        if self._maintenance is not None:
            self._maintenance.cancel()
            with suppress(asyncio.CancelledError):
                await self._maintenance
        if self._running:
            await asyncio.wait(self._running, timeout=_CLOSE_SECONDS)
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        if self._database is not None:
            await asyncio.to_thread(self._database.close)  # at once, or when the operations that still use it end

    def _check_refused(self, kind: Kind) -> None:
        if self._refusal is not None and kind == "write":
            raise StoreFailed(self._refusal)

    async def _submit(self, work: Callable[[Database], T], kind: Kind) -> T:
        def attempt() -> T:
            self._check_refused(kind)  # since this operation was submitted, another may have waited in vain
            try:
                return work(self._opened())
            except StoreBlocked as error:
                self._refusal = error.message
                raise

        if self._closed:
            raise StoreFailed("The store of responses is closed.")
        places = self._places[kind]
        tenant = current_tenant()
        match places.refusal(tenant):
            case "full":
                raise StoreFailed("The store of responses has too many operations waiting.")
            case "share":
                raise StoreShareExceeded(
                    "The store of responses has too many operations of this client waiting (--max-client-share)."
                )
        future = asyncio.wrap_future(self._pools[kind].submit(attempt))
        places.take(tenant)
        future.add_done_callback(lambda _: places.give_back(tenant))
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        future.add_done_callback(_retrieve)
        await asyncio.wait([future], timeout=_TIMEOUT)
        if not future.done():
            future.cancel()  # which keeps it from being started later
            self._refusal = f"The store of responses did not answer within {_TIMEOUT:g} s."
            raise StoreBlocked(self._refusal)
        if future.cancelled():
            raise StoreFailed("The store of responses is closed.")
        return future.result()

    def _opened(self) -> Database:
        with self._open_lock:
            if self._database is not None and self._database.replaced():
                logger.warning("the database of responses was removed or replaced; it is opened again")
                self._database.close()
                self._database = None
            if self._database is None:
                self._database = self._open_database()
                if self._closed:  # meanwhile, so that nothing else closes it
                    self._database.close()
            return self._database

    async def _maintain(self) -> None:
        """Check the database, and delete expired rows and shrink the file."""
        next_sweep = 0.0
        while True:
            try:
                await self._submit(_check(write=self.problem is not None), "check")
                if time.monotonic() >= next_sweep:
                    while await self._submit(lambda database: database.sweep(time.time()), "check"):
                        pass
                    next_sweep = time.monotonic() + _SWEEP_SECONDS
                self._note(None)
                self._refusal = None
            except StoreFailed as error:
                self._note(error)
                self._refusal = error.message
            await asyncio.sleep(_CHECK_SECONDS)

    def _note(self, error: StoreFailed | None) -> None:
        problem = None if error is None else error.message
        if problem == self.problem:
            return
        self.problem = problem
        if error is None:
            logger.warning("the store of responses works again")
        else:
            logger.error("%s Responses are answered without being stored. %s", error.message, error.detail)


def _check(*, write: bool) -> Callable[[Database], None]:
    return lambda database: database.check(write=write)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception as seen: the caller may have gone."""
    if not future.cancelled():
        future.exception()
