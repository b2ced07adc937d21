"""What a response has left from turn to turn: seconds and tokens."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from quire.api.chat.prepare import ChatCall
from quire.engine.wire.errors import DeadlineExceeded


class Allowance:
    """The limits of a whole response, from now on."""

    def __init__(self, timeout: float | None, tokens: int | None) -> None:
        """`timeout`: seconds; `tokens`: of output."""
        self._timeout = timeout
        self._tokens = tokens
        self._end = None if timeout is None else asyncio.get_running_loop().time() + timeout

    def tokens_left(self, used: int) -> bool:
        """Whether more may be generated."""
        return self._tokens is None or used < self._tokens

    def applied(self, call: ChatCall, used: int) -> ChatCall:
        """A later turn's call, held to what is left.

        Raises:
            DeadlineExceeded: no time is.
        """
        (request,) = call.requests
        most = request.params.max_tokens
        if self._tokens is not None:
            most = min(self._tokens - used, call.model.info.max_model_len - len(request.prompt))
        params = msgspec.structs.replace(request.params, max_tokens=most)
        request = dataclasses.replace(request, params=params, timeout=self._seconds_left())
        return dataclasses.replace(call, requests=[request])

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """End what takes too long.

        Raises:
            DeadlineExceeded: it did.
        """
        try:
            async with asyncio.timeout_at(self._end):
                yield
        except TimeoutError as error:
            raise self.late() from error

    def late(self) -> DeadlineExceeded:
        """What to raise when time is up."""
        return DeadlineExceeded(f"The request was ended after {self._timeout:g} seconds.")

    def _seconds_left(self) -> float | None:
        if self._end is None:
            return None
        left = self._end - asyncio.get_running_loop().time()
        if left <= 0:
            raise self.late()
        return left
