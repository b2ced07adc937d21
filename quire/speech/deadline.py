"""The time that is left for a transcription."""

from __future__ import annotations

import asyncio

from quire.engine.client.errors import DeadlineExceeded


class Deadline:
    """The end of a request's timeout, from which each request to the engine gets what is left."""

    def __init__(self, timeout: float | None) -> None:
        """`timeout`: in seconds from now; None: there is no end."""
        self._timeout = timeout
        self._clock = asyncio.get_running_loop().time
        self._end = None if timeout is None else self._clock() + timeout

    def seconds_left(self) -> float | None:
        """Seconds that are left; None: any number.

        Raises:
            DeadlineExceeded: there are none.
        """
        if self._end is None:
            return None
        if (left := self._end - self._clock()) <= 0:
            raise DeadlineExceeded(f"The request timed out after {self._timeout:g} seconds.")
        return left
