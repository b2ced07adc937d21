"""What a session needs of a model that transcribes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.api.serving.models import ServedModel
from quire.realtime.dialects.dialect import Usage
from quire.realtime.settings import SessionSettings


@dataclass(frozen=True, slots=True)
class Transcript:
    """All that was said in an utterance.

    Attributes:
        language: its code, if the model has detected it.
    """

    text: str
    usage: Usage
    language: str | None = None


class LiveSpeech(Protocol):
    """A model that reads an utterance while it is spoken, and each part of it once.

    Attributes:
        longest: seconds of an utterance at most.
    """

    longest: float

    async def follow(
        self,
        audio: AsyncGenerator[NDArray[np.float32], None],
        settings: SessionSettings,
        tell: Callable[[str], Awaitable[None]],
    ) -> Transcript:
        """Transcribe an utterance. Cancelling aborts the engine's request.

        Args:
            audio: pieces of it at 16 kHz, 1-D, in [-1, 1], as they come.
            settings: of the session.
            tell: gets each piece of the text; all of them together are the text.

        Raises:
            ApiError, EngineError: it is not possible.
        """


class Speech(Protocol):
    """A model that turns an utterance into text.

    Attributes:
        live: it also does so while the utterance is spoken; None: it reads utterances as a whole.
    """

    live: LiveSpeech | None

    def check(self, settings: SessionSettings) -> None:
        """Refuse settings that the model cannot follow.

        Raises:
            ApiError: for example its languages do not include the one of the session.
        """

    def transcribe(
        self, audio: NDArray[np.float32], settings: SessionSettings, *, draft: bool
    ) -> AsyncGenerator[str | Transcript, None]:
        """Transcribe an utterance at 16 kHz: pieces of text, then the transcript.

        Closing the generator aborts the engine's requests.

        Args:
            audio: 1-D, in [-1, 1].
            settings: of the session.
            draft: the utterance goes on; a text that looks wrong is not worth a second attempt.

        Raises:
            ApiError, EngineError, PromptError, WorkerError: it is not possible.
        """


SpeechOf = Callable[[ServedModel], Speech]
