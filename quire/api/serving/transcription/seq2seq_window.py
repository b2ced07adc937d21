"""Transcribes windows with Whisper and Moonshine: attempts at rising temperatures, segments, times of words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.api.serving.transcription.capabilities import only_language
from quire.api.serving.transcription.deadline import Deadline
from quire.api.serving.transcription.decoding_attempt import (
    DecodingAttempt,
    WindowResult,
    deltas_of,
    sampling_params,
    token_logprobs,
)
from quire.api.serving.transcription.quality import TEMPERATURES, probably_silent
from quire.api.serving.transcription.segments import SegmentSpan, spans_of
from quire.api.serving.transcription.text_stream import TextStream
from quire.api.serving.transcription.tokens import TranscriptionPrompt, TranscriptionTokens
from quire.api.serving.transcription.types import TranscriptionOptions, Word
from quire.api.serving.transcription.words import timed_words, within_segments
from quire.engine.wire.client import EngineClient
from quire.engine.wire.detokenizer import Detokenizer, TextParams
from quire.engine.wire.pooling_params import PoolingParams
from quire.engine.wire.protocol import MediaItem
from quire.engine.wire.sampling_params import SamplingParams, TokenProbs
from quire.engine.wire.stream import Delta, GenerateRequest, PoolRequest
from quire.multimodal.audio.cuts import Window, quietest
from quire.multimodal.audio.features import HOP, SAMPLE_RATE
from quire.multimodal.audio.reader import AudioReader
from quire.multimodal.audio.speech_items import make_item
from quire.multimodal.tokenizer import Tokenizer

Samples = NDArray[np.float32]
_SHORTEST = 10 * SAMPLE_RATE  # samples of a window that is not divided any more


class Seq2SeqWindowTranscriber:
    """Transcribes windows with an encoder-decoder model (Whisper, Moonshine); implements `WindowTranscriber`."""

    def __init__(
        self,
        client: EngineClient,
        reader: AudioReader,
        tokenizer: Tokenizer,
        tokens: TranscriptionTokens,
        options: TranscriptionOptions,
        tenant: str,
    ) -> None:
        self._client = client
        self._reader = reader
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._options = options
        self._tenant = tenant
        self._deadline = Deadline(options.timeout)
        self._kept: tuple[Window, MediaItem] | None = None
        self._earlier: Sequence[int] = ()
        self.language = options.language if tokens.info.languages else only_language(tokens.info)

    async def prepare(self, audio: Samples, windows: Sequence[Window]) -> None:
        """Tokenize the earlier text, and detect the language in the first window."""
        self._earlier = await self._reader.run(partial(self._tokens.earlier_text, self._options), tenant=self._tenant)
        if windows and self.language is None and self._tokens.info.languages:
            found = await self.detect(audio, windows[0])
            self.language = max(self._options.languages or found, key=found.__getitem__)

    async def _item(self, samples: Samples) -> MediaItem:
        return await self._reader.run(partial(make_item, samples, self._tokens.info), tenant=self._tenant)

    async def detect(self, audio: Samples, window: Window) -> dict[str, float]:
        """The probability of each language in a window, by ISO code. Its features are kept until it is decoded.

        Raises:
            EngineError: the engine failed.
            QueueFull: too many jobs wait.
        """
        info = self._tokens.info
        item = await self._item(audio[window.start : window.end])
        self._kept = (window, item)
        codes = list(info.languages)
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            eos_token_ids=(self._tokens.end,),
            token_probs=TokenProbs(0, tuple(info.languages[code] for code in codes)),
        )
        request = GenerateRequest(
            prompt=np.array([self._tokens.start], np.int32),
            params=params,
            items=(item,),
            timeout=self._deadline.seconds_left(),
        )
        probabilities: list[float] = []
        async with aclosing(self._client.generate(request)) as deltas:
            async for delta in deltas:
                probabilities = delta.token_probs or probabilities
        total = sum(probabilities) or 1.0
        return {code: value / total for code, value in zip(codes, probabilities, strict=True)}

    async def transcribe(self, audio: Samples, window: Window, text_stream: TextStream) -> list[WindowResult]:
        """Transcribe a window. If its text exceeds the token limit, its two halves are transcribed instead."""
        samples = audio[window.start : window.end]
        kept, self._kept = self._kept, None
        item = kept[1] if kept is not None and kept[0] == window else await self._item(samples)
        prompt = self._tokens.prompt(self._options, self.language, self._earlier)
        attempt = await self._best_attempt(item, prompt, self._positions(len(samples)), text_stream)
        quality = attempt.quality
        if attempt.limited and not text_stream.sent and not quality.repeats and len(samples) > _SHORTEST:
            middle = window.start + len(samples) // 4 + quietest(samples[len(samples) // 4 : -len(samples) // 4])
            halves = Window(window.start, middle), Window(middle, window.end)
            return [result for half in halves for result in await self.transcribe(audio, half, TextStream())]
        if quality.silent and not text_stream.sent:
            attempt.discard()
        text_tokens = [token for token in attempt.output if self._tokens.is_text(token)]
        spans = spans_of(attempt.output, self._tokens, window.seconds)
        return [
            WindowResult(
                window=window,
                attempt=attempt,
                quality=quality,
                spans=spans,
                words=await self._words(item, text_tokens, spans, window) if self._options.words else (),
                text_tokens=text_tokens,
            )
        ]

    async def _best_attempt(
        self, item: MediaItem, prompt: TranscriptionPrompt, audio_tokens: int, text_stream: TextStream
    ) -> DecodingAttempt:
        """The first attempt that can be trusted, or the last one. Text that was sent is not replaced."""
        given = self._options.temperature
        for temperature in (given,) if given or self._options.beams else TEMPERATURES:
            attempt = DecodingAttempt(temperature, len(prompt.tokens), audio_tokens)
            await self._run(attempt, item, prompt, text_stream)
            if text_stream.sent or attempt.limited or not attempt.quality.failed:
                break
        return attempt

    async def _run(
        self, attempt: DecodingAttempt, item: MediaItem, prompt: TranscriptionPrompt, text_stream: TextStream
    ) -> None:
        detokenizer = Detokenizer(self._tokenizer.backend, (), TextParams())
        request = GenerateRequest(
            prompt=prompt.tokens,
            params=self._params(prompt, attempt.temperature),
            items=(item,),
            timeout=self._deadline.seconds_left(),
        )
        generating = deltas_of(self._client, request, self._options, self._tokenizer, self._tokens.forbids)
        async with aclosing(generating) as deltas:
            async for delta in deltas:
                self._take(attempt, delta, detokenizer)
                if text_stream.live and not probably_silent(attempt.no_speech_prob):
                    text_stream.send(attempt.pieces)

    def _take(self, attempt: DecodingAttempt, delta: Delta, detokenizer: Detokenizer) -> None:
        if delta.token_probs:
            attempt.no_speech_prob = delta.token_probs[0]
        attempt.output += delta.token_ids
        logprobs = [entry.logprobs[0] for entry in delta.logprobs]
        attempt.logprobs += logprobs
        last = delta.finish_reason is not None
        attempt.end(delta.finish_reason, self._options)
        shown = [index for index, token in enumerate(delta.token_ids) if self._tokens.is_text(token)]
        tokens = [delta.token_ids[index] for index in shown]
        text = detokenizer.push(tokens, last=last)
        wanted = [logprobs[index] for index in shown]
        attempt.add_piece(text, token_logprobs(self._tokenizer, tokens, wanted) if self._options.logprobs else ())

    def _params(self, prompt: TranscriptionPrompt, temperature: float) -> SamplingParams:
        info, options = self._tokens.info, self._options
        room = info.max_output_tokens - len(prompt.tokens)
        max_tokens = room if options.max_tokens is None else min(room, options.max_tokens)
        return msgspec.structs.replace(
            sampling_params(options, temperature, max_tokens=max_tokens, eos_token_ids=(self._tokens.end,)),
            allowed_tokens=self._tokens.allowed(timestamps=options.timestamps),
            begin_suppress_tokens=info.begin_suppress_tokens,
            timestamp_rule=self._tokens.rule if options.timestamps else None,
            token_probs=None if info.no_speech_token is None else TokenProbs(prompt.start, (info.no_speech_token,)),
        )

    async def _words(
        self, item: MediaItem, text_tokens: Sequence[int], spans: Sequence[SegmentSpan], window: Window
    ) -> list[tuple[int, Word]]:
        """The words of a window with their times, and the index of the token with which each begins."""
        info = self._tokens.info
        control = self._tokens.prompt(_untimed(self._options), self.language).tokens
        known = list(text_tokens[: info.max_output_tokens - len(control) - 1])
        if not known or not info.aligns_words:
            return []
        params = PoolingParams(
            task="align", skip_tokens=len(control) - 1, num_positions=self._positions(window.end - window.start)
        )
        prompt = np.array([*control, *known, self._tokens.end], np.int32)
        request = PoolRequest(prompt=prompt, params=params, items=(item,), timeout=self._deadline.seconds_left())
        alignment = (await self._client.pool(request)).data[:-1]  # a row gives the time of the token that follows
        words = await self._reader.run(
            partial(timed_words, alignment, known, self._tokens, self.language), tenant=self._tenant
        )
        within_segments(words, spans)
        return [
            (word.first, Word(word.text.strip(), window.offset + word.start, window.offset + word.end))
            for word in words
        ]

    def _positions(self, samples: int) -> int:
        """Positions of the encoder that hold audio."""
        info = self._tokens.info
        columns = math.ceil(samples / HOP) if info.features == "log_mel" else samples
        return max(1, info.positions(columns))


def _untimed(options: TranscriptionOptions) -> TranscriptionOptions:
    return TranscriptionOptions(task=options.task, timestamps=False)
