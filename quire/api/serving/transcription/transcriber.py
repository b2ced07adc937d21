"""Transcribes audio of any length: windows that run side by side, whose text is given in order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.api.http.errors import InvalidRequest, shortened
from quire.api.http.tenant import current_tenant
from quire.api.serving.models import ServedModel
from quire.api.serving.transcription.abilities import refused_options
from quire.api.serving.transcription.ctc_window import CTCWindowDecoder
from quire.api.serving.transcription.joining import Joiner
from quire.api.serving.transcription.running import RunningWindows
from quire.api.serving.transcription.tokens import SpeechTokens
from quire.api.serving.transcription.types import (
    Finished,
    Segment,
    SegmentDone,
    SpeechUsage,
    TranscriptionEvent,
    TranscriptionOptions,
    VoiceOptions,
    Word,
)
from quire.api.serving.transcription.window import DecodesWindows, WindowDecoder, WindowResult
from quire.multimodal.audio.cuts import Window, cut, cut_between
from quire.multimodal.audio.features import SAMPLE_RATE
from quire.multimodal.audio.voice_activity import find_speech

Samples = NDArray[np.float32]
_ONLY_LANGUAGE = "en"  # of whispers that have no tokens for languages


class Transcriber:
    """Transcribes with one model.

    The caller of `transcribe` has reserved one place with `EngineClient.slots`. Further windows run beside the first
    while half of all places are free.
    """

    def __init__(self, served: ServedModel) -> None:
        """Prepare for a model.

        Raises:
            InvalidRequest: it does not transcribe.
        """
        if served.info.speech is None or served.audio is None:
            raise InvalidRequest(
                f"The model `{served.names[0]}` does not transcribe; it supports: {', '.join(served.tasks)}.", "model"
            )
        self._served = served
        self._info = served.info.speech
        self._audio = served.audio
        self._tokens = None
        if self._info.kind != "ctc":
            self._tokens = SpeechTokens(self._info, served.renderer.tokenizer, served.info.vocab_size)

    @property
    def generates(self) -> bool:
        """Whether tokens are generated, one after the other, so that their number matters."""
        return self._tokens is not None

    def check(self, options: TranscriptionOptions) -> None:
        """Refuse what the model cannot do.

        Raises:
            InvalidRequest: it does not know the language, does not translate, does not align words, or has no use for
                an option.
        """
        name = self._served.names[0]
        given = () if options.language is None else (options.language,)
        for field, reason in refused_options(self._info, options):
            raise InvalidRequest(f"`{field}` is not supported by the model `{name}`: {reason}.", field)
        for field, codes in (("language", given), ("languages", options.languages)):
            for code in codes:
                if code not in self._languages:
                    raise InvalidRequest(
                        f"Unsupported language: {shortened(code)!r}. The model `{name}` knows: "
                        f"{', '.join(sorted(self._languages))}.",
                        field,
                    )
        if options.task == "translate" and self._info.translate_token is None:
            raise InvalidRequest(f"The model `{name}` does not translate.", "model")
        if options.words and not self._info.aligns_words:
            raise InvalidRequest(f"The model `{name}` does not give times of words.", "timestamp_granularities")

    async def transcribe(
        self, audio: Samples, options: TranscriptionOptions
    ) -> AsyncGenerator[TranscriptionEvent, None]:
        """Transcribe audio. Closing the generator aborts the engine's requests.

        Args:
            audio: 1-D float32 at 16 kHz, in [-1, 1].
            options: what is to be done.

        Yields:
            Pieces of text; behind those of a window its segments; at last `Finished`.

        Raises:
            InvalidRequest: see `check`.
            EngineError: the engine failed.
            QueueFull: too many jobs wait.
        """
        self.check(options)
        served, tenant = self._served, current_tenant()
        windows = await self._audio.run(
            partial(_windows, audio, self._info.chunk_seconds, options.voice), tenant=tenant
        )
        decoder, language = await self._decoder(audio, windows, options)
        joiner, collected = Joiner(language), _Collected()
        async with aclosing(RunningWindows(served.client, decoder, audio, windows)) as running:
            for number in range(len(windows)):
                feed = running.take_turn(number, live=options.live)
                joiner.next_window()
                while (piece := await feed.next()) is not None:
                    if (given := joiner.add(piece)) is not None:
                        yield given
                for index, result in enumerate(await running.results(number)):
                    if index:
                        joiner.next_window()
                    for rest in result.attempt.pieces[feed.given :]:
                        if (given := joiner.add(rest)) is not None:
                            yield given
                    for event in collected.add(result, served):
                        yield event
        seconds = len(audio) / SAMPLE_RATE
        served.client.observer.on_audio(seconds)
        yield collected.finished(joiner.text, language, seconds)

    async def detect_language(self, audio: Samples) -> dict[str, float]:
        """The probability of each language in the first window of audio, by ISO code; empty for one language.

        The caller has reserved a place.

        Raises:
            EngineError: the engine failed.
            QueueFull: too many jobs wait.
        """
        if not self._info.languages or self._tokens is None:
            return {}
        decoder = self._window_decoder(self._tokens, TranscriptionOptions())
        return await decoder.detect(audio, Window(0, min(len(audio), round(self._info.chunk_seconds * SAMPLE_RATE))))

    async def _decoder(
        self, audio: Samples, windows: Sequence[Window], options: TranscriptionOptions
    ) -> tuple[DecodesWindows, str | None]:
        """What decodes the windows, and the language of the audio; None if the model does not say which it knows."""
        served, tenant = self._served, current_tenant()
        tokenizer = served.renderer.tokenizer
        if self._tokens is None:
            return CTCWindowDecoder(served.client, self._audio, tokenizer, self._info, options, tenant), None
        decoder = self._window_decoder(self._tokens, options)
        decoder.earlier = await self._audio.run(partial(self._tokens.earlier_text, options), tenant=tenant)
        if not self._info.languages:
            decoder.language = next(iter(self._languages), None)
        elif windows and decoder.language is None:
            found = await decoder.detect(audio, windows[0])
            decoder.language = max(options.languages or found, key=found.__getitem__)
        return decoder, decoder.language

    def _window_decoder(self, tokens: SpeechTokens, options: TranscriptionOptions) -> WindowDecoder:
        served = self._served
        return WindowDecoder(served.client, self._audio, served.renderer.tokenizer, tokens, options, current_tenant())

    @property
    def _languages(self) -> Sequence[str]:
        return tuple(self._info.languages) or ((_ONLY_LANGUAGE,) if self._info.kind == "whisper" else ())


class _Collected:
    """The transcription so far."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._words: list[Word] = []
        self._audio_tokens = self._text_tokens = self._output_tokens = 0

    def add(self, result: WindowResult, served: ServedModel) -> list[SegmentDone]:
        """The segments of a window."""
        self._audio_tokens += result.audio_tokens
        self._text_tokens += result.prompt_tokens
        self._output_tokens += len(result.attempt.output)
        events = []
        for span in result.spans:
            text = served.renderer.tokenizer.decode(
                list(result.text_tokens[span.first : span.last]), skip_special_tokens=True
            )
            words = tuple(word for first, word in result.words if span.first <= first < span.last)
            segment = Segment(
                id=len(self._segments),
                seek=round(result.window.offset * 100),
                start=result.window.offset + span.start,
                end=result.window.offset + span.end,
                text=text,
                tokens=span.tokens,
                temperature=result.attempt.temperature,
                avg_logprob=result.quality.avg_logprob,
                compression_ratio=result.quality.compression_ratio,
                no_speech_prob=result.quality.no_speech_prob,
            )
            self._segments.append(segment)
            self._words += words
            events.append(SegmentDone(segment, words))
        return events

    def finished(self, text: str, language: str | None, seconds: float) -> Finished:
        """The whole."""
        return Finished(
            text=text,
            language=language,
            duration=seconds,
            usage=SpeechUsage(
                seconds=seconds,
                audio_tokens=self._audio_tokens,
                text_tokens=self._text_tokens,
                output_tokens=self._output_tokens,
            ),
            segments=tuple(self._segments),
            words=tuple(self._words),
        )


def _windows(audio: Samples, seconds: float, voice: VoiceOptions | None) -> list[Window]:
    if voice is None:
        return cut(audio, seconds)
    speech = find_speech(audio, voice.threshold, voice.prefix_padding_ms, voice.silence_duration_ms)
    return cut_between(audio, speech, seconds)
