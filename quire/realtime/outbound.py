"""The events that wait until a client reads them."""

from __future__ import annotations

import asyncio
from collections import deque


class Outbound:
    """A queue of encoded events, bounded by bytes: senders wait while a client reads slowly."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames: deque[bytes] = deque()
        self._size = 0  # bytes of the frames, and of the one that is being written
        self._changed = asyncio.Condition()

    @property
    def size(self) -> int:
        """Bytes that wait."""
        return self._size

    async def put(self, frame: bytes) -> None:
        """Add an event once there is room; one that is larger than the bound waits for an empty queue."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._size or self._size + len(frame) <= self._max_bytes)
            self._frames.append(frame)
            self._size += len(frame)
            self._changed.notify_all()

    async def get(self) -> bytes:
        """The next event. It counts until `written`."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._frames))
            return self._frames.popleft()

    async def written(self, frame: bytes) -> None:
        """The connection has taken an event."""
        async with self._changed:
            self._size -= len(frame)
            self._changed.notify_all()

    async def flushed(self) -> None:
        """Wait until all events have been written."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._size)
