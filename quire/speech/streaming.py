"""Transcribes with models that read audio while it arrives: files, and live audio."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.deadline import Deadline
from quire.engine.client.detokenizer import Detokenizer, TextParams
from quire.engine.client.protocol import AudioItem, FeatureArray
from quire.engine.client.stream import Delta, GenerateRequest
from quire.engine.client.streaming import DelayedStreamsInfo, Streams, TransducerInfo
from quire.multimodal.audio.cuts import Window
from quire.multimodal.audio.features import SAMPLE_RATE
from quire.multimodal.audio.frames import feature_maker, frame_samples, frames_of
from quire.multimodal.audio.reader import AudioReader
from quire.serving.models import ServedModel
from quire.speech.aligned_words import AlignedToken, AlignedWord, align_words, segment_words, timed_words
from quire.speech.attempt import DecodingAttempt, WindowResult, sampling_params, token_logprobs
from quire.speech.types import TranscriptDelta, TranscriptionDone, TranscriptionOptions, TranscriptionUsage
from quire.speech.windows import Joiner, TextStream
from quire.workers.tenant import take_turn

Samples = NDArray[np.float32]
SendText = Callable[[TranscriptDelta], Awaitable[None]]
_NO_TOKENS = np.empty(0, np.int32)


class _FrameClock:
    """Tell to which frame of the audio each generated token belongs."""

    def __init__(self, info: Streams) -> None:
        self._info = info if isinstance(info, TransducerInfo) else None
        self._frame = 0
        self._symbols = 0  # tokens of the frame so far

    def place(self, token: int) -> int:
        """The frame of the next token."""
        frame, info = self._frame, self._info
        self._symbols += 1
        if info is None or token == info.blank_token or self._symbols == info.max_symbols:
            self._frame, self._symbols = frame + 1, 0
        return frame


class StreamedText:
    """The text of a request: of its tokens without those that stand for no text."""

    def __init__(
        self,
        served: ServedModel,
        info: Streams,
        options: TranscriptionOptions,
        prompt_tokens: int,
        audio_tokens: int = 0,
    ) -> None:
        """Start without generated tokens. For the numbers see `DecodingAttempt`."""
        self._tokenizer = served.renderer.tokenizer
        self._special = frozenset(self._tokenizer.special_tokens.values()) | set(served.eos_token_ids)
        self._blank = info.blank_token if isinstance(info, TransducerInfo) else None
        self._clock = _FrameClock(info)
        self._detokenizer = Detokenizer(self._tokenizer.backend, (), TextParams())
        self._options = options
        self.attempt = DecodingAttempt(options.numbers.temperature, prompt_tokens, audio_tokens)
        self.tokens: list[AlignedToken] = []  # tokens of the text, with their frames

    def push(self, delta: Delta) -> None:
        """Add generated tokens; their text becomes a piece of the attempt. Blanks are not part of its output."""
        attempt, shown = self.attempt, list[AlignedToken]()
        for token, entry in zip(delta.token_ids, delta.logprobs, strict=True):
            frame = self._clock.place(token)
            if token == self._blank:
                continue
            attempt.output.append(token)
            attempt.logprobs.append(entry.logprobs[0])
            if token not in self._special:
                shown.append(AlignedToken(token, entry.logprobs[0], frame, frame + 1))
        attempt.end(delta.finish_reason, self._options)
        self.tokens += shown
        tokens = [token.token for token in shown]
        text = self._detokenizer.push(tokens, last=delta.finish_reason is not None)
        logprobs = [token.logprob for token in shown]
        attempt.add_piece(text, token_logprobs(self._tokenizer, tokens, logprobs) if self._options.logprobs else ())

    def words(self, seconds_per_frame: float, seconds: float) -> list[AlignedWord]:
        """The words of a window of `seconds`, with the times at which they were generated, minus the delay."""
        tokenizer = self._tokenizer
        contents = [tokenizer.token_bytes(token.token) for token in self.tokens]
        return align_words(self.tokens, contents, seconds_per_frame, seconds, spaced=tokenizer.separates_words)


class StreamingWindowTranscriber:
    """Transcribe windows of files, without temperature fallback; implements `WindowTranscriber`."""

    language: str | None = None

    def __init__(
        self, served: ServedModel, info: Streams, reader: AudioReader, options: TranscriptionOptions, tenant: str
    ) -> None:
        self._served = served
        self._info = info
        self._reader = reader
        self._options = options
        self._tenant = tenant

    async def prepare(self, audio: Samples, windows: Sequence[Window]) -> None:
        """Do nothing: all windows have the same prompt."""

    async def transcribe(self, audio: Samples, window: Window, text_stream: TextStream) -> None:
        """Transcribe a window by one request with all of its audio."""
        samples = audio[window.start : window.end]
        features = await self._reader.run(partial(frames_of, samples, self._info), tenant=self._tenant)
        request = _request(self._served, self._info, self._options, (_item(features),), self._options.deadline)
        frame = frame_samples(self._info)
        text = StreamedText(self._served, self._info, self._options, len(request.prompt), -(-len(samples) // frame))
        async with aclosing(self._served.client.generate(request)) as deltas:
            async for delta in deltas:
                text.push(delta)
                if text_stream.live:
                    text_stream.send(text.attempt.pieces)
        attempt = text.attempt
        words = text.words(frame / SAMPLE_RATE, window.seconds)
        text_stream.finish_part(
            WindowResult(
                window=window,
                attempt=attempt,
                quality=attempt.quality,
                spans=segment_words(words, text.tokens),
                words=timed_words(words, window.offset) if self._options.words else (),
                text_tokens=[token.token for token in text.tokens],
            )
        )


class LiveTranscription:
    """Transcribe audio while it arrives, by one open request."""

    def __init__(self, served: ServedModel, info: Streams, options: TranscriptionOptions) -> None:
        self._served = served
        self._info = info
        self._options = options
        self._maker = feature_maker(self._info)
        self._samples = 0

    async def run(self, audio: AsyncGenerator[Samples, None], send_text: SendText) -> TranscriptionDone:
        """Transcribe. The caller has reserved a slot with `Engine.slots`; cancelling aborts the request.

        Args:
            audio: pieces at 16 kHz, 1-D float32 in [-1, 1], of any length; reading stops once the model has
                generated its end token.
            send_text: called with each piece of the text. All pieces together are the text.

        Raises:
            EngineError: the engine failed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                return await self._run(group, audio, send_text)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run(
        self, group: asyncio.TaskGroup, audio: AsyncGenerator[Samples, None], send_text: SendText
    ) -> TranscriptionDone:
        request = _request(self._served, self._info, self._options, (), self._options.deadline, is_open=True)
        assert request.request_id is not None
        text, joiner = StreamedText(self._served, self._info, self._options, len(request.prompt)), Joiner(None)
        async with aclosing(self._served.client.generate(request)) as deltas:
            # It begins once this task waits: then the request has been sent.
            feeding = group.create_task(self._feed(request.request_id, audio))
            async for delta in deltas:
                sent = len(text.attempt.pieces)
                text.push(delta)
                for piece in text.attempt.pieces[sent:]:
                    if (joined := joiner.add(piece)) is not None:
                        await send_text(joined)
            feeding.cancel()
        seconds = self._samples / SAMPLE_RATE
        self._served.client.observers.on_audio(seconds)
        usage = TranscriptionUsage(
            seconds=seconds,
            audio_tokens=self._maker.frames,
            text_tokens=len(request.prompt),
            output_tokens=len(text.attempt.output),
        )
        return TranscriptionDone(text=joiner.text, language=None, duration=seconds, usage=usage)

    async def _feed(self, request_id: str, audio: AsyncGenerator[Samples, None]) -> None:
        async with aclosing(audio) as pieces:
            async for samples in pieces:
                for start in range(0, len(samples), SAMPLE_RATE):
                    await take_turn()  # a second of audio takes a millisecond or two
                    part = samples[start : start + SAMPLE_RATE]
                    self._samples += len(part)
                    self._extend(request_id, self._maker.push(part))
        self._extend(request_id, self._maker.finish(), last=True)

    def _extend(self, request_id: str, features: FeatureArray, *, last: bool = False) -> None:
        if features.shape[1] or last:
            items = (_item(features),) if features.shape[1] else ()
            self._served.client.extend(request_id, _NO_TOKENS, last=last, items=items)


def _request(
    served: ServedModel,
    info: Streams,
    options: TranscriptionOptions,
    items: tuple[AudioItem, ...],
    deadline: Deadline,
    *,
    is_open: bool = False,
) -> GenerateRequest:
    """A request that transcribes audio: it generates the tokens of all frames, or up to `max_tokens` of the options."""
    if isinstance(info, DelayedStreamsInfo):
        prompt, most, eos = info.prompt, served.info.max_model_len, served.eos_token_ids
    else:
        prompt, most, eos = [], served.info.max_model_len * info.max_symbols, ()
    most = most if options.max_tokens is None else options.max_tokens
    return GenerateRequest(
        prompt=np.array(prompt, np.int32),
        params=sampling_params(options, options.numbers.temperature, max_tokens=most, eos_token_ids=eos),
        items=items,
        deadline=deadline,
        open=is_open,
        request_id=uuid.uuid4().hex if is_open else None,
    )


def _item(features: FeatureArray) -> AudioItem:
    return AudioItem(hash=b"", features=np.ascontiguousarray(features))
