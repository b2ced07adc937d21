"""The text of one window on its way to the reader, who reads the windows in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from quire.api.serving.transcription.types import TextDelta


class Feed:
    """Text of a window. Nothing is given before it is the window's turn, so that it may be decoded again until then.

    Attributes:
        live: its text is read while it is generated.
        given: pieces that were given; they cannot be taken back.
    """

    def __init__(self) -> None:
        self.live = False
        self.given = 0
        self._pieces: deque[TextDelta] = deque()
        self._arrived = asyncio.Event()
        self._ended = False

    def give(self, pieces: Sequence[TextDelta]) -> None:
        """Give what has not been given of all pieces so far."""
        if len(pieces) > self.given:
            self._pieces.extend(pieces[self.given :])
            self.given = len(pieces)
            self._arrived.set()

    def end(self) -> None:
        """Nothing follows."""
        self._ended = True
        self._arrived.set()

    async def next(self) -> TextDelta | None:
        """The next piece; None at the end."""
        while not self._pieces:
            if self._ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return self._pieces.popleft()
