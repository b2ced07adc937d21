"""HTTP to MCP servers with bounds on what is received: nothing of an answer is parsed before it was counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import httpx2

from quire.protocol.strict_json import count_values
from quire.workers.shares import Shares

_MAX_LINES = 1 << 12  # of event streams, in one list or call: each event has three or four
_MAX_VALUES = 1 << 17  # of JSON in one message, as `count_values` counts them; the library needs 2 µs for an array
_SMALL = 1 << 16  # bytes of a list or call that need not be reserved: there are at most as many as slots
_EVENTS = "text/event-stream"


class AnswerRefused(httpx2.TransportError):
    """A server sends more, or something else, than it may."""


class AnswerBudget:
    """What one list or call may receive, in all of its HTTP answers together.

    Attributes:
        problem: why it was refused; None as long as it was not.
    """

    def __init__(self, limit: int, memory: Shares, tenant: str, stop: Callable[[], None]) -> None:
        """Begin with nothing.

        Args:
            limit: bytes.
            memory: bytes of all lists and calls at once.
            tenant: the client that they belong to.
            stop: ends the list or call, which may ignore errors of single answers.
        """
        self.problem: str | None = None
        self._limit = limit
        self._memory = memory
        self._tenant = tenant
        self._stop = stop
        self._bytes = 0
        self._lines = 0
        self._reserved = 0  # bytes

    def refuse(self, problem: str) -> AnswerRefused:
        """End the list or call, and give the error to raise."""
        self.problem = self.problem or problem
        self._stop()
        return AnswerRefused(problem)

    def add(self, count: int) -> None:
        """Count bytes that have arrived.

        Raises:
            AnswerRefused: they are too many.
        """
        if self._bytes + count > self._limit:
            raise self.refuse(
                f"The tool server sent more than {self._limit} bytes, the limit of --max-tool-answer-size."
            )
        self._bytes += count
        if self._bytes > _SMALL and not self._reserved:  # all that may follow, so that no two wait for each other
            if self._memory.refusal(self._tenant, self._limit) is not None:
                raise self.refuse("Too much is being received from tool servers. Please retry later.")
            self._memory.take(self._tenant, self._limit)
            self._reserved = self._limit

    def add_line(self) -> None:
        """Count a line of an event stream.

        Raises:
            AnswerRefused: there are too many.
        """
        self._lines += 1
        if self._lines > _MAX_LINES:
            raise self.refuse(f"The tool server sent more than {_MAX_LINES} lines of events.")

    def check_message(self, message: bytes) -> None:
        """Check the number of JSON values in a message.

        Raises:
            AnswerRefused: there are too many.
        """
        if len(message) < _MAX_VALUES // 8:  # it cannot have so many
            return
        values, containers, strings = count_values(message, _MAX_VALUES)
        if values > _MAX_VALUES or 8 * containers > _MAX_VALUES or 4 * strings > _MAX_VALUES:
            raise self.refuse("The tool server sent a message with too many JSON values.")

    def close(self) -> None:
        """Free the memory of the answers, of which nothing is needed any more."""
        if self._reserved:
            self._memory.give_back(self._tenant, self._reserved)
            self._reserved = 0


class BoundedTransport(httpx2.AsyncBaseTransport):
    """A transport whose answers are counted. Compressed ones are refused: they could grow without bounds."""

    def __init__(self, transport: httpx2.AsyncBaseTransport, budget: AnswerBudget) -> None:
        self._transport = transport
        self._budget = budget

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, and count its answer while it is read."""
        request.headers["Accept-Encoding"] = "identity"
        response = await self._transport.handle_async_request(request)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            raise self._budget.refuse("The tool server sent a compressed answer, which is not accepted.")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        of_events = response.headers.get("content-type", "").lower().startswith(_EVENTS)
        counted = _EventStream if of_events else _WholeBody
        return httpx2.Response(
            response.status_code,
            headers=response.headers,
            stream=counted(response.stream, self._budget),
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()


class _CountedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, budget: AnswerBudget) -> None:
        self._stream = stream
        self._budget = budget

    async def aclose(self) -> None:
        """Close the answer."""
        await self._stream.aclose()


class _WholeBody(_CountedStream):
    """An answer that is one message."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        body = bytearray()
        async for chunk in self._stream:
            self._budget.add(len(chunk))
            body += chunk
        self._budget.check_message(bytes(body))
        yield bytes(body)


class _EventStream(_CountedStream):
    """An answer of many messages, each in a line. JSON has no line ends inside of strings."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        line = bytearray()
        async for chunk in self._stream:
            self._budget.add(len(chunk))
            *ended, unfinished = chunk.replace(b"\r", b"\n").split(b"\n")
            for part in ended:
                line += part
                self._budget.add_line()
                self._budget.check_message(bytes(line))
                line.clear()
            line += unfinished
            yield chunk
