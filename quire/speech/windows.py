"""Windows of long audio: what transcribes them, how many run at once, and how their texts become one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.engine import Engine
from quire.multimodal.audio.cuts import Window
from quire.multimodal.audio.features import SAMPLE_RATE
from quire.speech.attempt import WindowResult
from quire.speech.types import TranscriptDelta

Samples = NDArray[np.float32]
MOST = 16  # windows at once: enough to fill the encoder, and a few megabytes of features
_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
_FEATURES = 2  # of a window: here and in the engine. They are not larger than its samples, padded to a whole window
_MORE_HEARINGS = 3  # windows more of an utterance that is heard again: two of features, and the audio that was moved
_SAMPLE = 4  # bytes


class TextStream:
    """Stream the pieces of a window's text, and the results of its parts, each behind its pieces.

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


class WindowTranscriber(Protocol):
    """Transcribe the windows of one transcription.

    Attributes:
        language: ISO code of the speech; None as long as it is not known.
    """

    language: str | None

    async def prepare(self, audio: Samples, windows: Sequence[Window]) -> None:
        """Prepare what all windows share, such as the prompt or the detected language.

        Raises:
            EngineError: the engine failed.
            PromptError: the prompt cannot be made.
            QueueFull: too many jobs wait.
        """

    async def transcribe(self, audio: Samples, window: Window, text_stream: TextStream) -> None:
        """Transcribe a window, or parts of it one after the other, and send text and results to `text_stream`.

        Raises:
            EngineError: the engine failed.
            QueueFull: too many jobs wait.
        """


class RunningWindows:
    """Run the windows in order. The first slot is the caller's; others are taken while half of all slots are free."""

    def __init__(
        self,
        client: Engine,
        transcriber: WindowTranscriber,
        audio: NDArray[np.float32],
        windows: Sequence[Window],
        tenant: str,
        *,
        most: int = MOST,
    ) -> None:
        """Start the first windows. `tenant`: holds the slots; `most`: how many may run at once."""
        self._most = most
        self._client = client
        self._transcriber = transcriber
        self._audio = audio
        self._windows = windows
        self._tenant = tenant
        self._streams = [TextStream() for _ in windows]
        self._tasks: list[asyncio.Task[None]] = []
        self._running: set[int] = set()
        self._start()

    def take_turn(self, number: int, *, live: bool) -> TextStream:
        """The text stream of a window, which is read from now on."""
        self._streams[number].live = live
        return self._streams[number]

    async def finished(self, number: int) -> None:
        """Wait for the end of a window whose text stream has ended.

        Raises:
            EngineError: the engine failed.
            QueueFull: too many jobs wait.
        """
        await self._tasks[number]

    async def aclose(self) -> None:
        """Abort running windows and release their slots."""
        left, self._running = len(self._running), set()
        if left:
            self._client.release_slots(left - 1, self._tenant)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self) -> None:
        while len(self._tasks) < len(self._windows) and len(self._running) < self._most:
            if self._running and not self._client.take_slot(self._tenant):
                return
            number = len(self._tasks)
            self._running.add(number)
            self._tasks.append(asyncio.create_task(self._run(number)))

    async def _run(self, number: int) -> None:
        try:
            await self._transcriber.transcribe(self._audio, self._windows[number], self._streams[number])
        finally:
            self._streams[number].end()
            if number in self._running:  # else they were closed
                self._running.remove(number)
                if self._running:  # the first place is the caller's
                    self._client.release_slots(1, self._tenant)
        self._start()


class Joiner:
    """The text so far has no white space at its ends, and a space between parts where the language has them."""

    def __init__(self, language: str | None) -> None:
        self._spaced = language not in _WITHOUT_SPACES
        self._texts: list[str] = []
        self._held = ""  # white space that is given once something follows
        self._held_input = self._held_output = 0  # tokens that are counted once something follows
        self._fresh = False  # the next piece is the first of a part

    @property
    def text(self) -> str:
        """The text given so far."""
        return "".join(self._texts)

    def next_part(self) -> None:
        """Note that the text of another part follows."""
        self._fresh = True

    def add(self, piece: TranscriptDelta) -> TranscriptDelta | None:
        """The piece as it is given; None if there is nothing to give yet."""
        text = self._held + piece.text
        if not self._texts:
            text = text.lstrip()
        elif self._fresh and self._spaced and piece.text and not text[:1].isspace():
            text = f" {text}"
        self._fresh = self._fresh and not piece.text
        complete = text.rstrip()
        self._held = text[len(complete) :]
        self._held_input += piece.input_tokens
        self._held_output += piece.output_tokens
        if not complete and not piece.logprobs:
            return None
        if complete:
            self._texts.append(complete)
        delta = TranscriptDelta(complete, piece.logprobs, self._held_input, self._held_output)
        self._held_input = self._held_output = 0
        return delta


def kept_bytes(samples: int, window_seconds: float) -> int:
    """Bytes of audio and of its features while it is transcribed; see `feature_bytes`."""
    return _SAMPLE * samples + feature_bytes(samples, window_seconds)


def feature_bytes(samples: int, window_seconds: float, *, rehears: bool = False) -> int:
    """Bytes of the features of audio while it is transcribed.

    Args:
        samples: at 16 kHz.
        window_seconds: longest audio of one request to the engine.
        rehears: doubtful audio is heard again; see `TranscriptionOptions`.
    """
    windows = _FEATURES + (_MORE_HEARINGS if rehears else 0)
    window = round(window_seconds * SAMPLE_RATE)
    return _SAMPLE * windows * min(max(samples, window), MOST * window)
