"""The results of one window of audio, streamed to their reader. Windows are read in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from quire.speech.decoding_attempt import WindowResult
from quire.speech.types import TranscriptDelta


class TextStream:
    """Streams the pieces of a window's text, and the results of its parts, each behind its pieces.

    A part that is not finished is not sent before the window's turn; until then it may be decoded again.

    Attributes:
        live: the text is sent while it is generated.
        sent: number of pieces of the current part that were sent; they cannot be taken back.
    """

    def __init__(self) -> None:
        self.live = False
        self.sent = 0
        self._items: deque[TranscriptDelta | WindowResult] = deque()
        self._arrived = asyncio.Event()
        self._ended = False

    def send(self, pieces: Sequence[TranscriptDelta]) -> None:
        """Send those of all pieces of the current part so far that have not been sent."""
        if len(pieces) > self.sent:
            self._items.extend(pieces[self.sent :])
            self.sent = len(pieces)
            self._arrived.set()

    def finish_part(self, result: WindowResult) -> None:
        """Send what is left of the current part, and its result; a further part may follow."""
        self.send(result.attempt.pieces)
        self._items += (result.attempt.uncounted, result)
        self.sent = 0
        self._arrived.set()

    def end(self) -> None:
        """Mark the end of the window."""
        self._ended = True
        self._arrived.set()

    async def next(self) -> TranscriptDelta | WindowResult | None:
        """Return the next piece or result; None at the end."""
        while not self._items:
            if self._ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return self._items.popleft()
