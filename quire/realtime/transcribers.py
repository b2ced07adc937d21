"""Transcribes utterances with the `Transcriber` that the endpoints for files use as well."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.model_info import Transcribes
from quire.engine.client.streaming import Streams
from quire.multimodal.memory import Reservation
from quire.realtime.audio import RATE
from quire.realtime.settings import SessionSettings
from quire.realtime.transcript import Transcript, Usage
from quire.realtime.utterance_transcriber import StreamingTranscriber, TranscriberOf, UtteranceTranscriber
from quire.serving.models import ServedModel, SpeechModel
from quire.speech.streaming import LiveTranscription
from quire.speech.transcriber import Transcriber
from quire.speech.types import TokenLogprob, TranscriptDelta, TranscriptionDone, TranscriptionOptions
from quire.speech.windows import feature_bytes
from quire.workers.tenant import current_tenant

_TOKENS_PER_SECOND, _MORE_TOKENS = 12, 16  # in a draft; fast speech has half as many


class WholeUtteranceTranscriber:
    """A `UtteranceTranscriber` that transcribes an utterance as a whole; `streaming` if the model can do that."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._transcriber = Transcriber(model)
        self.streaming: StreamingTranscriber | None = None
        if isinstance(model, SpeechModel) and not isinstance(model.speech, Transcribes):
            self.streaming = OpenRequestTranscriber(model, model.speech, self._transcriber.window_seconds)

    def check(self, settings: SessionSettings) -> None:
        """Refuse settings that the model does not support; see `UtteranceTranscriber.check`."""
        self._transcriber.check(_options(settings, draft=False))

    async def transcribe(
        self, audio: NDArray[np.float32], settings: SessionSettings, *, draft: bool
    ) -> AsyncGenerator[TranscriptDelta | Transcript, None]:
        """Transcribe an utterance; see `UtteranceTranscriber.transcribe`."""
        options = _options(settings, draft=draft)
        if draft and self._transcriber.generates:
            # A model that repeats itself must not hold up those who wait for their text.
            options = replace(options, max_tokens=int(len(audio) / RATE * _TOKENS_PER_SECOND) + _MORE_TOKENS)
        logprobs = list[TokenLogprob]()
        with await self._reserved(len(audio), draft), self._model.client.slots(1, current_tenant()):
            async with aclosing(self._transcriber.transcribe(audio, options, draft=draft)) as events:
                async for event in events:
                    match event:
                        case TranscriptDelta():
                            logprobs += event.logprobs
                            yield event
                        case TranscriptionDone():
                            yield _transcript(event, logprobs if options.logprobs else None)

    async def _reserved(self, samples: int, draft: bool) -> Reservation:
        """Memory for the features; that for the audio is the session's. A draft does not wait for it."""
        memory = self._transcriber.reader.memory
        tenant = current_tenant()
        rehears = self._transcriber.rehears and not draft
        size = feature_bytes(samples, self._transcriber.window_seconds, rehears=rehears)
        return memory.take(size, tenant) if draft else await memory.reserve(size, tenant)


class OpenRequestTranscriber:
    """A `StreamingTranscriber` for models that read audio while they generate: an open request for each utterance."""

    def __init__(self, model: ServedModel, streams: Streams, max_seconds: float) -> None:
        """`streams`: facts about the model; `max_seconds`: see `StreamingTranscriber`."""
        self._streams = streams
        self.max_seconds = max_seconds
        self._model = model

    async def transcribe(
        self,
        audio: AsyncGenerator[NDArray[np.float32], None],
        settings: SessionSettings,
        send_text: Callable[[TranscriptDelta], Awaitable[None]],
    ) -> Transcript:
        """Transcribe an utterance while it is spoken; see `StreamingTranscriber.transcribe`."""
        live = LiveTranscription(self._model, self._streams, _options(settings, draft=False))
        logprobs = list[TokenLogprob]()

        async def send(piece: TranscriptDelta) -> None:
            logprobs.extend(piece.logprobs)
            await send_text(piece)

        with self._model.client.slots(1, current_tenant()):
            return _transcript(await live.run(audio, send), logprobs if settings.logprobs else None)


def _transcript(event: TranscriptionDone, logprobs: Sequence[TokenLogprob] | None) -> Transcript:
    usage = event.usage
    counts = Usage(usage.seconds, usage.audio_tokens, usage.text_tokens, usage.output_tokens)
    return Transcript(event.text, counts, event.language, None if logprobs is None else tuple(logprobs))


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
    return TranscriptionOptions(
        language=settings.language, prompt=settings.prompt, live=draft, rehears=not draft, logprobs=settings.logprobs
    )
