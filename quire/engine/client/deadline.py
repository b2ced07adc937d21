"""Deadline: the end of the time that a request may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quire.engine.client.errors import DeadlineExceeded


class Deadline:
    """The end of a request's timeout, which all that is done for the request shares. Time runs from its creation."""

    __slots__ = ("_end", "_timeout")

    def __init__(self, *timeouts: float | None) -> None:
        """`timeouts`: in seconds, of which the shortest counts; None and 0: no limit."""
        self._timeout = min((seconds for seconds in timeouts if seconds), default=None)
        self._end = None if self._timeout is None else asyncio.get_running_loop().time() + self._timeout

    @property
    def error(self) -> DeadlineExceeded:
        """The error of a request whose time has passed."""
        return DeadlineExceeded(f"The request timed out after {self._timeout:g} seconds.")

    def check(self) -> None:
        """Check that there is time left.

        Raises:
            DeadlineExceeded: there is none.
        """
        if self._end is not None and asyncio.get_running_loop().time() >= self._end:
            raise self.error

    def call(self, callback: Callable[[DeadlineExceeded], object]) -> Callable[[], None]:
        """Call `callback` with the error once the time has passed. Returns a function that prevents it."""
        if self._end is None:
            return _do_nothing
        return asyncio.get_running_loop().call_at(self._end, lambda: callback(self.error)).cancel

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancel the body of the `async with` once the time has passed.

        Raises:
            DeadlineExceeded: it was cancelled.
        """
        try:
            async with asyncio.timeout_at(self._end) as scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise self.error from error


def _do_nothing() -> None:
    """Prevent nothing: there is no end."""
