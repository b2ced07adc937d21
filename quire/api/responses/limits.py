"""The limits of a response that span its turns: its timeout and `max_output_tokens`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from quire.api.chat.prepare import PreparedChat
from quire.engine.client.errors import DeadlineExceeded


class ResponseLimits:
    """Counts the time of a response from now on, and limits its turns."""

    def __init__(self, timeout: float | None, tokens: int | None) -> None:
        """`timeout`: in seconds; `tokens`: `max_output_tokens`."""
        self._timeout = timeout
        self._tokens = tokens
        self._end = None if timeout is None else asyncio.get_running_loop().time() + timeout

    def tokens_left(self, used: int) -> bool:
        """Return whether more tokens may be generated."""
        return self._tokens is None or used < self._tokens

    def apply(self, turn: PreparedChat, used: int) -> PreparedChat:
        """A later turn, limited to the tokens and the time that are left.

        Raises:
            DeadlineExceeded: no time is left.
        """
        (request,) = turn.requests
        max_tokens = request.params.max_tokens
        if self._tokens is not None:
            max_tokens = min(self._tokens - used, turn.model.info.max_model_len - len(request.prompt))
        params = msgspec.structs.replace(request.params, max_tokens=max_tokens)
        request = dataclasses.replace(request, params=params, timeout=self._seconds_left())
        return dataclasses.replace(turn, requests=[request])

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Cancel the body of the `async with` at the end of the timeout.

        Raises:
            DeadlineExceeded: it was cancelled.
        """
        try:
            async with asyncio.timeout_at(self._end):
                yield
        except TimeoutError as error:
            raise self.timeout_error() from error

    def timeout_error(self) -> DeadlineExceeded:
        """The error of a response whose timeout has passed."""
        return DeadlineExceeded(f"The request timed out after {self._timeout:g} seconds.")

    def _seconds_left(self) -> float | None:
        if self._end is None:
            return None
        left = self._end - asyncio.get_running_loop().time()
        if left <= 0:
            raise self.timeout_error()
        return left
