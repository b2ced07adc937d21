"""Transcribes audio of any length: windows run concurrently, and their text is yielded in order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.model_info import Transcribes
from quire.engine.client.streaming import DelayedStreamsInfo, TransducerInfo
from quire.multimodal.audio.cuts import Window, cut, cut_between
from quire.multimodal.audio.features import SAMPLE_RATE
from quire.multimodal.audio.reader import AudioReader
from quire.multimodal.audio.voice_activity import find_speech
from quire.protocol.errors import InvalidRequest
from quire.serving.models import AudioInput, GeneratingModel, ServedModel, SpeechModel
from quire.speech.attempt import WindowResult
from quire.speech.capabilities import Capabilities, check_options, speech_to_text_capabilities, streaming_capabilities
from quire.speech.chat import ChatWindowTranscriber, capabilities_of
from quire.speech.ctc import CTCWindowTranscriber
from quire.speech.seq2seq import Seq2SeqWindowTranscriber
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
from quire.speech.windows import MOST, Joiner, RunningWindows, WindowTranscriber
from quire.workers.tenant import current_tenant

Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Way:
    """How a model transcribes.

    Attributes:
        reader: decodes its audio.
        transcriber: makes the transcriber of the windows of a request, of its options and its tenant.
        detector: does so for a model that gives probabilities of languages; None for others.
    """

    reader: AudioReader
    capabilities: Capabilities
    transcriber: Callable[[TranscriptionOptions, str], WindowTranscriber]
    detector: Callable[[TranscriptionOptions, str], Seq2SeqWindowTranscriber] | None = None


def _way_of(served: ServedModel) -> _Way:
    """Return how a model transcribes; an error if it does not."""
    tokenizer, max_len = served.renderer.tokenizer, served.info.max_model_len
    match served:
        case SpeechModel(speech=Transcribes(kind="ctc") as speech, reader=reader):
            new = partial(CTCWindowTranscriber, served.client, reader, tokenizer, speech)
            return _Way(reader, speech_to_text_capabilities(speech), new)
        case SpeechModel(speech=Transcribes() as speech, reader=reader):
            tokens = TranscriptionTokens(speech, tokenizer, served.info.vocab_size)
            seq2seq = partial(Seq2SeqWindowTranscriber, served.client, reader, tokenizer, tokens)
            return _Way(reader, speech_to_text_capabilities(speech), seq2seq, seq2seq if speech.languages else None)
        case SpeechModel(speech=DelayedStreamsInfo() | TransducerInfo() as streams, reader=reader):
            streamed = partial(StreamingWindowTranscriber, served, streams, reader)
            return _Way(reader, streaming_capabilities(streams, max_len), streamed)
        case GeneratingModel(audio=AudioInput() as audio):
            chat = partial(ChatWindowTranscriber, served, audio)
            return _Way(audio.reader, capabilities_of(audio.info, max_len), chat)
    raise InvalidRequest(
        f"The model `{served.names[0]}` does not transcribe; it supports: {', '.join(served.tasks)}.", "model"
    )


class Transcriber:
    """Transcribe with one model.

    The caller of `transcribe` has reserved one slot, or one for each beam, with `Engine.slots`. Without beam
    search further windows run concurrently while half of all slots are free.
    """

    def __init__(self, served: ServedModel) -> None:
        """Prepare for a model.

        Raises:
            InvalidRequest: it does not transcribe.
        """
        self._served = served
        self._way = _way_of(served)

    @property
    def reader(self) -> AudioReader:
        """Decodes the audio of the model's requests."""
        return self._way.reader

    @property
    def generates(self) -> bool:
        """Whether tokens are generated, one after the other, so that their number matters."""
        return self._way.capabilities.generates

    @property
    def rehears(self) -> bool:
        """Whether doubtful audio is heard again if the options say so, which takes memory."""
        return self._way.capabilities.rehears

    @property
    def window_seconds(self) -> float:
        """Longest audio of one request to the engine."""
        return self._way.capabilities.window_seconds

    def check(self, options: TranscriptionOptions) -> None:
        """Refuse options that the model does not support.

        Raises:
            InvalidRequest: see `check_options`.
        """
        check_options(self._served.names[0], self._way.capabilities, options)

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
        transcriber = self._way.transcriber(options, tenant)
        seconds = self._way.capabilities.window_seconds
        windows = await self.reader.run(partial(_windows, audio, seconds, options.voice), tenant=tenant)
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
            served.client.observers.on_audio(seconds)
        yield collected.finished(joiner.text, transcriber.language, seconds)

    def check_detection(self, options: TranscriptionOptions) -> None:
        """Refuse to detect the language of speech if the model does not give probabilities of languages.

        Raises:
            InvalidRequest: it does not, or it does not know one of `options.languages`.
        """
        self._detector()
        self.check(options)

    def _detector(self) -> Callable[[TranscriptionOptions, str], Seq2SeqWindowTranscriber]:
        if self._way.detector is None:
            raise InvalidRequest(
                f"The model `{self._served.names[0]}` does not detect languages: only multilingual Whisper models do.",
                "model",
            )
        return self._way.detector

    async def detect_language(self, audio: Samples, options: TranscriptionOptions) -> dict[str, float]:
        """The probability of each language in the first window of audio, by ISO code.

        The caller has reserved a slot with `Engine.slots`.

        Args:
            audio: 1-D float32 at 16 kHz, in [-1, 1]; at least one sample.
            options: `languages` are those to which the detection is restricted; `deadline`.

        Raises:
            InvalidRequest: see `check_detection`.
            EngineError: the engine failed.
            QueueFull: too many jobs wait.
        """
        detector = self._detector()(options, current_tenant())
        self.check(options)
        window = Window(0, min(len(audio), round(self._way.capabilities.window_seconds * SAMPLE_RATE)))
        probabilities = await detector.detect(audio, window)
        chosen = {code: probabilities[code] for code in options.languages or probabilities}
        total = sum(chosen.values())
        return {code: value / total if total else 1 / len(chosen) for code, value in chosen.items()}


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
