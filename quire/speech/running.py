"""Runs the windows of one transcription concurrently, while slots of the engine are free."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.engine import Engine
from quire.multimodal.audio.cuts import Window
from quire.speech.text_stream import TextStream
from quire.speech.window_transcriber import WindowTranscriber

MOST = 16  # windows at once: enough to fill the encoder, and a few megabytes of features


class RunningWindows:
    """Runs the windows in order. The first slot is the caller's; others are taken while half of all slots are free."""

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
