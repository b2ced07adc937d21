"""The text of one window of audio, streamed to its reader. Windows are read in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from quire.api.serving.transcription.types import TranscriptDelta


class TextStream:
    """Streams the text of a window. Nothing is sent before the window's turn; until then it may be decoded again.

    Attributes:
        live: the text is sent while it is generated.
        sent: number of pieces that were sent; they cannot be taken back.
    """

    def __init__(self) -> None:
        self.live = False
        self.sent = 0
        self._pieces: deque[TranscriptDelta] = deque()
        self._arrived = asyncio.Event()
        self._ended = False

    def send(self, pieces: Sequence[TranscriptDelta]) -> None:
        """Send those of all pieces so far that have not been sent."""
        if len(pieces) > self.sent:
            self._pieces.extend(pieces[self.sent :])
            self.sent = len(pieces)
            self._arrived.set()

    def end(self) -> None:
        """Mark the end of the text."""
        self._ended = True
        self._arrived.set()

    async def next(self) -> TranscriptDelta | None:
        """The next piece; None at the end."""
        while not self._pieces:
            if self._ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return self._pieces.popleft()
