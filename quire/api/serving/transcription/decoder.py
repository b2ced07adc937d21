"""What the transcriber needs of a kind of model: its abilities, and a decoder of windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.api.serving.transcription.attempt import WindowResult
from quire.api.serving.transcription.feed import Feed
from quire.multimodal.audio.cuts import Window

Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a model that transcribes can do.

    Attributes:
        window_seconds: longest audio that it takes at once.
        languages: ISO codes that it can be told.
        chooses_language: it tells the probabilities of languages, so that some can be excluded.
        translates: into English.
        aligns_words: it gives times of words.
        takes_prompt: earlier text or words to expect can be given.
    """

    window_seconds: float
    languages: tuple[str, ...]
    chooses_language: bool = False
    translates: bool = False
    aligns_words: bool = False
    takes_prompt: bool = True


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
        """Decode a window, or parts of it one after the other.

        Raises:
            EngineError: the engine failed.
            QueueFull: too many jobs wait.
        """
