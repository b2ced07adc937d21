"""WindowTranscriber: the interface of what transcribes a window, with an implementation for each kind of model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.multimodal.audio.cuts import Window
from quire.speech.text_stream import TextStream

Samples = NDArray[np.float32]


class WindowTranscriber(Protocol):
    """Transcribes the windows of one transcription.

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
