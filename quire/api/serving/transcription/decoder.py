"""What the transcriber needs of a kind of model: a decoder of windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.api.serving.transcription.attempt import WindowResult
from quire.api.serving.transcription.feed import Feed
from quire.multimodal.audio.cuts import Window

Samples = NDArray[np.float32]


class Decoder(Protocol):
    """Decodes the windows of one transcription.

    Attributes:
        language: ISO code of the speech; None as long as it is not known.
    """

    language: str | None

    async def prepare(self, audio: Samples, windows: Sequence[Window]) -> None:
        """Do what all windows need.

        Raises:
            EngineError: the engine failed.
            PromptError: the prompt is not possible.
            QueueFull: too many jobs wait.
        """

    async def decode(self, audio: Samples, window: Window, feed: Feed) -> list[WindowResult]:
        """Decode a window, or parts of it one after the other. Text that is given to `feed` is not taken back.

        Raises:
            EngineError: the engine failed.
            QueueFull: too many jobs wait.
        """
