"""Transcribes windows with Whisper and Moonshine: attempts at rising temperatures, segments, times of words.

A model that writes timestamps may stop before the end of a window, behind a pause or at its token limit. What it has
not transcribed becomes a further part of the window, as in whisper's own loop (Radford et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from operator import itemgetter

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.engine.client.detokenizer import Detokenizer, TextParams
from quire.engine.client.engine import Engine
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import AudioItem
from quire.engine.client.sampling_params import SamplingParams, TokenProbs
from quire.engine.client.stream import Delta, GenerateRequest, PoolRequest
from quire.multimodal.audio.cuts import Window, last_pause
from quire.multimodal.audio.features import HOP, SAMPLE_RATE
from quire.multimodal.audio.items import make_item
from quire.multimodal.audio.reader import AudioReader
from quire.rendering.tokenizer import Tokenizer
from quire.speech.attempt import (
    DOUBTFUL,
    TEMPERATURES,
    DecodingAttempt,
    WindowResult,
    deltas_of,
    probably_silent,
    sampling_params,
    token_logprobs,
)
from quire.speech.capabilities import only_language
from quire.speech.segments import (
    LEAD,
    LEAST_ADVANCE,
    SegmentSpan,
    next_start,
    spans_of,
    spans_of_words,
    within_segments,
)
from quire.speech.speech_stretches import SpeechStretches, find_stretches
from quire.speech.tokens import TranscriptionPrompt, TranscriptionTokens, spoken
from quire.speech.types import TranscriptionOptions, Word
from quire.speech.windows import TextStream
from quire.speech.words import WordTokens, timed_words

Samples = NDArray[np.float32]
_SHIFTS = (1 / 3, 2 / 3)  # of a position of the encoder, by which audio is moved when it is heard again
_SHORTEST = 10 * SAMPLE_RATE  # samples of a window that is not divided any more


class Seq2SeqWindowTranscriber:
    """Transcribe windows with an encoder-decoder model (Whisper, Moonshine); implements `WindowTranscriber`."""

    def __init__(
        self,
        client: Engine,
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
        self._detected: tuple[Window, AudioItem] | None = None
        self._earlier: Sequence[int] = ()
        self._writes_timestamps = options.timestamps and tokens.rule is not None
        self.language = options.language if tokens.info.languages else only_language(tokens.info)

    async def prepare(self, audio: Samples, windows: Sequence[Window]) -> None:
        """Tokenize the earlier text, and detect the language in the first window."""
        self._earlier = await self._reader.run(partial(self._tokens.earlier_text, self._options), tenant=self._tenant)
        if windows and self.language is None and self._tokens.info.languages:
            probabilities = await self.detect(audio, windows[0])
            self.language = max(self._options.languages or probabilities, key=probabilities.__getitem__)

    async def _item(self, samples: Samples) -> AudioItem:
        return await self._reader.run(partial(make_item, samples, self._tokens.info), tenant=self._tenant)

    async def detect(self, audio: Samples, window: Window) -> dict[str, float]:
        """The probability of each language in a window, by ISO code. Its features are kept until it is decoded.

        Raises:
            EngineError: the engine failed.
            QueueFull: too many jobs wait.
        """
        info = self._tokens.info
        item = await self._item(audio[window.start : window.end])
        self._detected = (window, item)
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
            deadline=self._options.deadline,
        )
        probabilities: list[float] = []
        async with aclosing(self._client.generate(request)) as deltas:
            async for delta in deltas:
                probabilities = delta.token_probs or probabilities
        total = sum(probabilities) or 1.0
        return {code: value / total for code, value in zip(codes, probabilities, strict=True)}

    async def transcribe(self, audio: Samples, window: Window, text_stream: TextStream) -> None:
        """Transcribe a window, in parts if the model stops early. See `WindowTranscriber.transcribe`."""
        speech: SpeechStretches | None = None
        part: Window | None = window
        while part is not None:
            detected, self._detected = self._detected, None
            if detected is not None and detected[0] == part:
                item = detected[1]
            else:
                item = await self._item(audio[part.start : part.end])
            # The audio of further parts has been counted.
            positions = self._positions(window.end - window.start) if part == window else 0
            attempt = await self._best_attempt(item, positions, text_stream)
            if self._options.rehears and not text_stream.sent and self._is_doubtful(attempt):
                attempt = await self._reheard(audio[part.start : part.end], item, attempt, text_stream)
            if (middle := self._middle(audio, part, attempt, text_stream)) is not None:
                await self.transcribe(audio, Window(part.start, middle), text_stream)
                await self.transcribe(audio, Window(middle, part.end), text_stream)
                return
            if speech is None:
                speech = await self._speech(audio, window)
            part = await self._finish(part, item, attempt, speech.since(part.offset - window.offset), text_stream)

    def _middle(self, audio: Samples, part: Window, attempt: DecodingAttempt, text_stream: TextStream) -> int | None:
        """The quiet place at which a part is divided, because there is no room for its text; None if it is not."""
        if not attempt.limited or text_stream.sent or attempt.quality.repeats or part.end - part.start <= _SHORTEST:
            return None
        quarter = (part.end - part.start) // 4
        return part.start + quarter + last_pause(audio[part.start + quarter : part.end - quarter])

    async def _speech(self, audio: Samples, window: Window) -> SpeechStretches:
        """Where somebody speaks in a window, if times of words are to be found."""
        if not self._writes_timestamps and not self._options.words:
            return SpeechStretches()
        samples = audio[window.start : window.end]
        return await self._reader.run(partial(find_stretches, samples), tenant=self._tenant)

    async def _finish(
        self,
        part: Window,
        item: AudioItem,
        attempt: DecodingAttempt,
        speech: SpeechStretches,
        text_stream: TextStream,
    ) -> Window | None:
        """Send the result of a part; returns the part that follows."""
        quality = attempt.quality
        if quality.silent and not text_stream.sent:
            attempt.discard()
        text_tokens = [token for token in attempt.output if self._tokens.is_text(token)]
        spans = spans_of(attempt.output, self._tokens, part.seconds)
        words = await self._words(item, text_tokens, spans, part, speech)
        if speech.stretches:
            spans = spans_of_words(spans, words, self._tokens)
        else:
            within_segments(words, spans)
        start = self._next_start(attempt, spans, speech)
        if start is not None and speech.has(start) and spans[-1].start >= LEAST_ADVANCE and not text_stream.sent:
            # The model has stopped while somebody speaks. It would mishear words without those before them.
            last = spans.pop()
            start = max(last.start - LEAD, spans[-1].end if spans else 0.0, LEAST_ADVANCE)
            self._drop_text(attempt, last.first)
        text_stream.finish_part(
            WindowResult(
                window=part,
                attempt=attempt,
                quality=quality,
                spans=spans,
                words=[
                    (word.first, Word(word.text.strip(), part.offset + word.start, part.offset + word.end))
                    for word in words
                    if self._options.words
                ],
                text_tokens=text_tokens,
            )
        )
        if start is None or start >= part.seconds:
            return None
        return Window(part.start + round(start * SAMPLE_RATE), part.end)

    def _next_start(
        self, attempt: DecodingAttempt, spans: Sequence[SegmentSpan], speech: SpeechStretches
    ) -> float | None:
        """The second at which the next part begins; None if there is none."""
        if not self._writes_timestamps or attempt.truncated:
            return None
        times = [self._tokens.seconds(token) for token in attempt.output if self._tokens.is_timestamp(token)]
        expects_more = self._expects_more(attempt.output)
        return next_start(spans, times[-1] if times else None, speech, expects_more=expects_more)

    def _drop_text(self, attempt: DecodingAttempt, first: int) -> None:
        """Drop the text from a text token on, with the timestamp before it."""
        places = [place for place, token in enumerate(attempt.output) if self._tokens.is_text(token)]
        count = places[first]
        if count and self._tokens.is_timestamp(attempt.output[count - 1]):
            count -= 1
        output, logprobs = attempt.output[:count], attempt.logprobs[:count]
        attempt.discard()
        self._add(attempt, output, logprobs, self._detokenizer(), last=True)

    def _expects_more(self, output: Sequence[int]) -> bool:
        """Whether the model has ended at the beginning of a further segment."""
        written = [token for token in output if token != self._tokens.end]
        return len(written) > 1 and all(map(self._tokens.is_timestamp, written[-2:]))

    async def _best_attempt(self, item: AudioItem, audio_tokens: int, text_stream: TextStream) -> DecodingAttempt:
        """The first attempt that can be trusted, or the last one. Text that was sent is not replaced."""
        prompt = self._tokens.prompt(self._options, self.language, self._earlier)
        requested = self._options.numbers.temperature
        for temperature in (requested,) if requested or self._options.beams else TEMPERATURES:
            attempt = DecodingAttempt(temperature, len(prompt.tokens), audio_tokens)
            await self._run(attempt, item, prompt, text_stream)
            if text_stream.sent or not attempt.quality.failed or (attempt.limited and not attempt.quality.repeats):
                break
        return attempt

    def _is_doubtful(self, attempt: DecodingAttempt) -> bool:
        """Whether the model would sooner have written something else at some place of a text that can be trusted."""
        if attempt.temperature or self._options.beams:
            return False
        return self._is_complete(attempt) and any(
            logprob < DOUBTFUL and self._tokens.is_word(token)
            for token, logprob in zip(attempt.output, attempt.logprobs, strict=True)
        )

    def _is_complete(self, attempt: DecodingAttempt) -> bool:
        """Whether a text can be trusted, and is short enough to be judged as a prompt."""
        room = self._tokens.info.max_output_tokens - attempt.prompt_tokens - len(attempt.output)
        return attempt.quality.trusted and not attempt.limited and not attempt.truncated and room > 0

    async def _reheard(
        self, samples: Samples, item: AudioItem, first: DecodingAttempt, text_stream: TextStream
    ) -> DecodingAttempt:
        """The likeliest text of audio that is heard at other places of the encoder's positions as well.

        Where a sound lies within a position is chance, and changes what a doubtful word is heard as. If the first two
        attempts agree, there is no third; otherwise all of them judge each text.
        """
        prompt = self._tokens.prompt(self._options, self.language, self._earlier)
        attempts = [(first, item)]
        for shift in _SHIFTS:
            item = await self._item(self._shifted(samples, shift))
            attempt = DecodingAttempt(first.temperature, first.prompt_tokens, first.audio_tokens)
            await self._run(attempt, item, prompt, text_stream)
            if len(attempts) == 1 and spoken(attempt.text) == spoken(first.text):
                return first
            attempts.append((attempt, item))
        texts: dict[str, DecodingAttempt] = {}
        for attempt, _ in attempts:
            if self._is_complete(attempt):
                texts.setdefault(attempt.text, attempt)
        scores = [
            (await self._log_probability(attempt.output, attempts, prompt), attempt) for attempt in texts.values()
        ]
        return max(scores, key=itemgetter(0))[1]

    def _shifted(self, samples: Samples, shift: float) -> Samples:
        """Audio behind silence of a part of a position."""
        info = self._tokens.info
        silence = np.zeros(round(shift * info.time_precision * SAMPLE_RATE), np.float32)
        return np.concatenate([silence, samples])[: round(info.window_seconds * SAMPLE_RATE)]

    async def _log_probability(
        self, output: Sequence[int], attempts: Sequence[tuple[DecodingAttempt, AudioItem]], prompt: TranscriptionPrompt
    ) -> float:
        """The log-probability of an output, summed over what was heard in all attempts."""
        total = 0.0
        for attempt, item in attempts:
            if attempt.output == output:
                total += sum(attempt.logprobs)
                continue
            request = GenerateRequest(
                prompt=np.concatenate([prompt.tokens, np.array(output, np.int32)]),
                params=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
                items=(item,),
                deadline=self._options.deadline,
            )
            async with aclosing(self._client.generate(request)) as deltas:
                async for delta in deltas:
                    entries = (delta.prompt_logprobs or [])[len(prompt.tokens) :]
                    total += sum(entry.logprobs[0] for entry in entries if entry is not None)
        return total

    async def _run(
        self, attempt: DecodingAttempt, item: AudioItem, prompt: TranscriptionPrompt, text_stream: TextStream
    ) -> None:
        detokenizer = self._detokenizer()
        request = GenerateRequest(
            prompt=prompt.tokens,
            params=self._params(prompt, attempt.temperature),
            items=(item,),
            deadline=self._options.deadline,
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
        attempt.end(delta.finish_reason, self._options)
        logprobs = [entry.logprobs[0] for entry in delta.logprobs]
        self._add(attempt, delta.token_ids, logprobs, detokenizer, last=delta.finish_reason is not None)

    def _add(
        self,
        attempt: DecodingAttempt,
        output: Sequence[int],
        logprobs: Sequence[float],
        detokenizer: Detokenizer,
        *,
        last: bool,
    ) -> None:
        """Add tokens to the output, and a piece with their text."""
        attempt.output += output
        attempt.logprobs += logprobs
        shown = [index for index, token in enumerate(output) if self._tokens.is_text(token)]
        tokens = [output[index] for index in shown]
        text = detokenizer.push(tokens, last=last)
        text_logprobs = [logprobs[index] for index in shown]
        attempt.add_piece(
            text, token_logprobs(self._tokenizer, tokens, text_logprobs) if self._options.logprobs else ()
        )

    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer.backend, (), TextParams())

    def _params(self, prompt: TranscriptionPrompt, temperature: float) -> SamplingParams:
        info, options = self._tokens.info, self._options
        room = info.max_output_tokens - len(prompt.tokens)
        max_tokens = room if options.max_tokens is None else min(room, options.max_tokens)
        return msgspec.structs.replace(
            sampling_params(options, temperature, max_tokens=max_tokens, eos_token_ids=(self._tokens.end,)),
            allowed_tokens=self._tokens.allowed(timestamps=options.timestamps),
            begin_suppress_tokens=info.begin_suppress_tokens,
            timestamp_rule=self._tokens.rule if self._writes_timestamps else None,
            token_probs=None if info.no_speech_token is None else TokenProbs(prompt.start, (info.no_speech_token,)),
        )

    async def _words(
        self,
        item: AudioItem,
        text_tokens: Sequence[int],
        spans: Sequence[SegmentSpan],
        part: Window,
        speech: SpeechStretches,
    ) -> list[WordTokens]:
        """The words of a part with their times, if they are needed and the model can tell them."""
        info = self._tokens.info
        control = self._tokens.prompt(_untimed(self._options), self.language).tokens
        known = list(text_tokens[: info.max_output_tokens - len(control) - 1])
        if not known or not info.aligns_words or not (self._writes_timestamps or self._options.words):
            return []
        params = PoolingParams(
            task="align", skip_tokens=len(control) - 1, num_positions=self._positions(part.end - part.start)
        )
        prompt = np.array([*control, *known, self._tokens.end], np.int32)
        request = PoolRequest(prompt=prompt, params=params, items=(item,), deadline=self._options.deadline)
        alignment = (await self._client.pool(request)).data[:-1]  # a row gives the time of the token that follows
        bounds = [span.first for span in spans]
        align = partial(timed_words, alignment, known, self._tokens, self.language, speech, bounds)
        return await self._reader.run(align, tenant=self._tenant)

    def _positions(self, samples: int) -> int:
        """Positions of the encoder that hold audio."""
        info = self._tokens.info
        columns = math.ceil(samples / HOP) if info.features == "log_mel" else samples
        return max(1, info.positions(columns))


def _untimed(options: TranscriptionOptions) -> TranscriptionOptions:
    return TranscriptionOptions(task=options.task, timestamps=False)
