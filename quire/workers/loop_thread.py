"""An event loop in a thread of its own, for coroutines that would hold up the loop that serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from quire.workers.errors import WorkerError

Result = TypeVar("Result")


class LoopThread:
    """Run coroutines in another thread. The thread starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    async def run(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """The result of a coroutine, which has the caller's context. Cancelling this cancels it, without waiting.

        Raises:
            WorkerError: the thread has been closed.
        """
        if self._closed:
            raise WorkerError(f"the thread of {self._name} has ended")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=f"quire-{self._name}", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._loop))

    async def aclose(self) -> None:
        """Cancel what runs, and end the thread."""
        self._closed = True
        if self._loop is None or self._thread is None:
            return
        with suppress(asyncio.CancelledError):
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()
        self._loop = None


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
