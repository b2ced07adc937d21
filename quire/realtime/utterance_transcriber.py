"""The interface of models that transcribe utterances of a session."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.realtime.settings import SessionSettings
from quire.realtime.transcript import Transcript
from quire.serving.models import ServedModel
from quire.speech.types import TranscriptDelta


class StreamingTranscriber(Protocol):
    """A model that transcribes an utterance while it is spoken, and reads each part of it once.

    Attributes:
        max_seconds: longest utterance.
    """

    max_seconds: float

    async def transcribe(
        self,
        audio: AsyncGenerator[NDArray[np.float32], None],
        settings: SessionSettings,
        send_text: Callable[[TranscriptDelta], Awaitable[None]],
    ) -> Transcript:
        """Transcribe an utterance. Cancelling aborts the engine's request.

        Args:
            audio: pieces of it at 16 kHz, 1-D, in [-1, 1], as they arrive.
            settings: settings of the session.
            send_text: called with each piece of the text. All pieces together are the text.

        Raises:
            ApiError, EngineError: it is not possible.
        """


class UtteranceTranscriber(Protocol):
    """A model that transcribes utterances.

    Attributes:
        streaming: transcribes them while they are spoken; None: the model transcribes complete audio only.
    """

    streaming: StreamingTranscriber | None

    def check(self, settings: SessionSettings) -> None:
        """Refuse settings that the model does not support.

        Raises:
            ApiError: for example its languages do not include the one of the session.
        """

    def transcribe(
        self, audio: NDArray[np.float32], settings: SessionSettings, *, draft: bool
    ) -> AsyncGenerator[TranscriptDelta | Transcript, None]:
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
