"""Transcribes utterances with the `Transcriber` that the endpoints for files use as well."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.api.serving.models import ServedModel
from quire.api.serving.transcription.transcriber import Transcriber
from quire.api.serving.transcription.types import TextDelta, TranscriptionDone, TranscriptionOptions
from quire.realtime.audio import RATE
from quire.realtime.dialects.dialect import Usage
from quire.realtime.settings import SessionSettings
from quire.realtime.utterance_transcriber import TranscriberOf, Transcript, UtteranceTranscriber

_TOKENS_PER_SECOND, _MORE_TOKENS = 12, 16  # in a draft; fast speech has half as many


class WholeUtteranceTranscriber:
    """A `UtteranceTranscriber` for models that transcribe an utterance as a whole."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._transcriber = Transcriber(model)

    def check(self, settings: SessionSettings) -> None:
        """Refuse settings that the model does not support; see `UtteranceTranscriber.check`."""
        self._transcriber.check(_options(settings, draft=False))

    async def transcribe(
        self, audio: NDArray[np.float32], settings: SessionSettings, *, draft: bool
    ) -> AsyncGenerator[str | Transcript, None]:
        """Transcribe an utterance; see `UtteranceTranscriber.transcribe`."""
        options = _options(settings, draft=draft)
        if draft and self._transcriber.generates:
            # A model that repeats itself must not hold up those who wait for their text.
            options = replace(options, max_tokens=int(len(audio) / RATE * _TOKENS_PER_SECOND) + _MORE_TOKENS)
        with self._model.client.slots(1):
            async with aclosing(self._transcriber.transcribe(audio, options)) as events:
                async for event in events:
                    match event:
                        case TextDelta(text=text):
                            yield text
                        case TranscriptionDone(usage=usage):
                            counts = (usage.audio_tokens, usage.text_tokens, usage.output_tokens)
                            yield Transcript(event.text, Usage(usage.seconds, *counts), event.language)


def transcriber_factory() -> TranscriberOf:
    """Returns a function that gives the `UtteranceTranscriber` of a model, one for each model."""
    known: dict[str, UtteranceTranscriber] = {}

    def transcriber_of(model: ServedModel) -> UtteranceTranscriber:
        name = model.names[0]
        if name not in known:
            known[name] = WholeUtteranceTranscriber(model)
        return known[name]

    return transcriber_of


def _options(settings: SessionSettings, *, draft: bool) -> TranscriptionOptions:
    # Text that was given is not generated again, so `live` text is that of the first attempt.
    return TranscriptionOptions(language=settings.language, prompt=settings.prompt, live=draft)
