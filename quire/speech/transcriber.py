"""Transcribes audio of any length: windows run concurrently, and their text is yielded in order."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.multimodal.audio.cuts import Window, cut, cut_between
from quire.multimodal.audio.features import SAMPLE_RATE
from quire.multimodal.audio.voice_activity import find_speech
from quire.protocol.errors import InvalidRequest
from quire.serving.models import ServedModel
from quire.speech.capabilities import check_options, speech_to_text_capabilities, streaming_capabilities
from quire.speech.chat_prompt import capabilities_of
from quire.speech.chat_window import ChatWindowTranscriber
from quire.speech.ctc_window import CTCWindowTranscriber
from quire.speech.decoding_attempt import WindowResult
from quire.speech.joining import Joiner
from quire.speech.running import MOST, RunningWindows
from quire.speech.seq2seq_window import Seq2SeqWindowTranscriber
from quire.speech.streaming import StreamingWindowTranscriber
from quire.speech.tokens import TranscriptionTokens
from quire.speech.types import (
    Segment,
    SegmentDone,
    TranscriptionDone,
    TranscriptionEvent,
    TranscriptionOptions,
    TranscriptionUsage,
    VoiceOptions,
    Word,
)
from quire.speech.window_transcriber import WindowTranscriber
from quire.workers.tenant import current_tenant

Samples = NDArray[np.float32]


class Transcriber:
    """Transcribes with one model.

    The caller of `transcribe` has reserved one slot, or one for each beam, with `EngineClient.slots`. Without beam
    search further windows run concurrently while half of all slots are free.
    """

    def __init__(self, served: ServedModel) -> None:
        """Prepare for a model.

        Raises:
            InvalidRequest: it does not transcribe.
        """
        if "transcribe" not in served.tasks or served.audio is None:
            raise InvalidRequest(
                f"The model `{served.names[0]}` does not transcribe; it supports: {', '.join(served.tasks)}.", "model"
            )
        self._served = served
        self._audio = served.audio
        self._tokens: TranscriptionTokens | None = None  # of models that only transcribe, and generate
        if (speech := served.info.speech) is not None:
            self._capabilities = speech_to_text_capabilities(speech)
            if self._capabilities.generates:
                self._tokens = TranscriptionTokens(speech, served.renderer.tokenizer, served.info.vocab_size)
        elif (streaming := served.info.streaming) is not None:
            self._capabilities = streaming_capabilities(streaming, served.info.max_model_len)
        else:
            assert served.info.audio is not None
            self._capabilities = capabilities_of(served.info.audio, served.info.max_model_len)

    @property
    def generates(self) -> bool:
        """Whether tokens are generated, one after the other, so that their number matters."""
        return self._capabilities.generates

    @property
    def window_seconds(self) -> float:
        """Longest audio of one request to the engine."""
        return self._capabilities.window_seconds

    def check(self, options: TranscriptionOptions) -> None:
        """Refuse options that the model does not support.

        Raises:
            InvalidRequest: see `check_options`.
        """
        check_options(self._served.names[0], self._capabilities, options)

    async def transcribe(
        self, audio: Samples, options: TranscriptionOptions, *, draft: bool = False
    ) -> AsyncGenerator[TranscriptionEvent, None]:
        """Transcribe audio. Closing the generator aborts the engine's requests.

        Args:
            audio: 1-D float32 at 16 kHz, in [-1, 1].
            options: options of the transcription.
            draft: the audio will be transcribed again, so it is not counted in the metrics.

        Yields:
            Pieces of text; behind those of a window its segments; at last `TranscriptionDone`.

        Raises:
            InvalidRequest: see `check`.
            EngineError: the engine failed.
            QueueFull: too many jobs wait.
        """
        self.check(options)
        tenant = current_tenant()
        served = self._served
        transcriber = self._window_transcriber(options)
        seconds = self._capabilities.window_seconds
        windows = await self._audio.run(partial(_windows, audio, seconds, options.voice), tenant=tenant)
        await transcriber.prepare(audio, windows)
        most = 1 if options.beams else MOST  # the caller's slots are for the beams of one window
        joiner, collected = Joiner(transcriber.language), _Collected()
        async with aclosing(RunningWindows(served.client, transcriber, audio, windows, tenant, most=most)) as running:
            for number in range(len(windows)):
                text_stream = running.take_turn(number, live=options.live)
                joiner.next_part()
                while (item := await text_stream.next()) is not None:
                    if isinstance(item, WindowResult):
                        joiner.next_part()
                        for event in collected.add(item, served):
                            yield event
                    elif (delta := joiner.add(item)) is not None:
                        yield delta
                await running.finished(number)
        seconds = len(audio) / SAMPLE_RATE
        if not draft:
            served.client.observer.on_audio(seconds)
        yield collected.finished(joiner.text, transcriber.language, seconds)

    def check_detection(self, options: TranscriptionOptions) -> None:
        """Refuse to detect the language of speech if the model does not give probabilities of languages.

        Raises:
            InvalidRequest: it does not, or it does not know one of `options.languages`.
        """
        if self._tokens is None or not self._tokens.info.languages:
            raise InvalidRequest(
                f"The model `{self._served.names[0]}` does not detect languages: only multilingual Whisper models do.",
                "model",
            )
        self.check(options)

    async def detect_language(self, audio: Samples, options: TranscriptionOptions) -> dict[str, float]:
        """The probability of each language in the first window of audio, by ISO code.

        The caller has reserved a slot with `EngineClient.slots`.

        Args:
            audio: 1-D float32 at 16 kHz, in [-1, 1]; at least one sample.
            options: `languages` are those to which the detection is restricted; `timeout`.

        Raises:
            InvalidRequest: see `check_detection`.
            EngineError: the engine failed.
            QueueFull: too many jobs wait.
        """
        self.check_detection(options)
        assert self._tokens is not None
        window = Window(0, min(len(audio), round(self._capabilities.window_seconds * SAMPLE_RATE)))
        found = await self._seq2seq(self._tokens, options).detect(audio, window)
        chosen = {code: found[code] for code in options.languages or found}
        total = sum(chosen.values())
        return {code: value / total if total else 1 / len(chosen) for code, value in chosen.items()}

    def _window_transcriber(self, options: TranscriptionOptions) -> WindowTranscriber:
        if self._tokens is not None:
            return self._seq2seq(self._tokens, options)
        served, tenant = self._served, current_tenant()
        speech, audio = served.info.speech, served.info.audio
        if speech is not None:
            return CTCWindowTranscriber(served.client, self._audio, served.renderer.tokenizer, speech, options, tenant)
        if served.info.streaming is not None:
            return StreamingWindowTranscriber(served, served.info.streaming, self._audio, options, tenant)
        assert audio is not None
        return ChatWindowTranscriber(served, audio, self._audio, options, tenant)

    def _seq2seq(self, tokens: TranscriptionTokens, options: TranscriptionOptions) -> Seq2SeqWindowTranscriber:
        served = self._served
        return Seq2SeqWindowTranscriber(
            served.client, self._audio, served.renderer.tokenizer, tokens, options, current_tenant()
        )


class _Collected:
    """The transcription so far."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._words: list[Word] = []
        self._audio_tokens = self._text_tokens = self._output_tokens = 0
        self._truncated = False

    def add(self, result: WindowResult, served: ServedModel) -> list[SegmentDone]:
        """The segments of a window."""
        self._audio_tokens += result.attempt.audio_tokens
        self._text_tokens += result.attempt.prompt_tokens
        self._output_tokens += len(result.attempt.output)
        self._truncated = self._truncated or result.attempt.truncated
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

    def finished(self, text: str, language: str | None, seconds: float) -> TranscriptionDone:
        """The whole."""
        return TranscriptionDone(
            text=text,
            language=language,
            duration=seconds,
            usage=TranscriptionUsage(
                seconds=seconds,
                audio_tokens=self._audio_tokens,
                text_tokens=self._text_tokens,
                output_tokens=self._output_tokens,
            ),
            segments=tuple(self._segments),
            words=tuple(self._words),
            truncated=self._truncated,
        )


def _windows(audio: Samples, seconds: float, voice: VoiceOptions | None) -> list[Window]:
    if voice is None:
        return cut(audio, seconds)
    speech = find_speech(audio, voice.threshold, voice.prefix_padding_ms, voice.silence_duration_ms)
    return cut_between(audio, speech, seconds)
