"""The interface of models that transcribe utterances of a session."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.api.serving.models import ServedModel
from quire.realtime.dialects.dialect import Usage
from quire.realtime.settings import SessionSettings


@dataclass(frozen=True, slots=True)
class Transcript:
    """The transcript of an utterance.

    Attributes:
        language: language code, if the model has detected it.
    """

    text: str
    usage: Usage
    language: str | None = None


class UtteranceTranscriber(Protocol):
    """A model that transcribes utterances."""

    def check(self, settings: SessionSettings) -> None:
        """Refuse settings that the model does not support.

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
            settings: settings of the session.
            draft: the utterance has not ended, so the text is not generated again at a higher temperature.

        Raises:
            ApiError, EngineError, PromptError, WorkerError: it is not possible.
        """


TranscriberOf = Callable[[ServedModel], UtteranceTranscriber]
