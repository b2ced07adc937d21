"""LoopThread: a thread with an event loop, in which the connections to other engines live."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

_PATIENCE = 2.0  # seconds that connections may take to end
Result = TypeVar("Result")


class LoopThread:
    """Run coroutines in a thread of its own, so that no step waits for a connection.

    Attributes:
        is_closing: all coroutines are being cancelled.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self.is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-kv-transfer", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the thread, soon."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a coroutine, which `close` cancels. Called in the thread."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """Cancel all coroutines, and end the thread."""
        with suppress(TimeoutError):  # the thread is a daemon
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        self.is_closing = True
        while tasks := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # for what closed connections have queued
