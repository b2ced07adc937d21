"""Transcribes windows of audio with a language model that reads audio."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.detokenizer import Detokenizer, TextParams
from quire.engine.client.protocol import MediaItem, TokenArray
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.stream import GenerateRequest
from quire.multimodal.audio.cuts import Window
from quire.multimodal.audio.items import audio_items, place_audio, token_count
from quire.rendering.prompts import Prompt
from quire.serving.models import AudioInput, GeneratingModel
from quire.speech.chat_prompt import AnswerReader, reader_of, transcription_prompt
from quire.speech.decoding_attempt import DecodingAttempt, WindowResult, deltas_of, sampling_params, token_logprobs
from quire.speech.quality import TEMPERATURES
from quire.speech.segments import SegmentSpan
from quire.speech.text_stream import TextStream
from quire.speech.types import TranscriptionOptions

Samples = NDArray[np.float32]
# Fast speech has six tokens a second, and several times as many in scripts of which the vocabulary has only bytes.
_TOKENS_PER_SECOND, _MORE_TOKENS = 25, 64


class ChatWindowTranscriber:
    """Transcribes windows with a language model that reads audio; implements `WindowTranscriber`."""

    def __init__(self, served: GeneratingModel, audio: AudioInput, options: TranscriptionOptions, tenant: str) -> None:
        self._served = served
        self._info = audio.info
        self._reader = audio.reader
        self._options = options
        self._tenant = tenant
        self._prompt: Prompt | None = None
        self.language = options.language

    async def prepare(self, audio: Samples, windows: Sequence[Window]) -> None:
        """Render the prompt, which all windows share."""
        if windows:
            self._prompt = await transcription_prompt(self._served, self._info, self._options, self._tenant)

    async def transcribe(self, audio: Samples, window: Window, text_stream: TextStream) -> None:
        """Transcribe a window by one request, repeated at higher temperatures where the text is poor."""
        samples = audio[window.start : window.end]
        if not token_count(len(samples), self._info):
            return
        items = await self._reader.run(partial(audio_items, samples, self._info), tenant=self._tenant)
        assert self._prompt is not None
        prompt, placed = place_audio(self._prompt.token_ids, self._info, [items])
        attempt, text = await self._best_attempt(prompt, placed, window.seconds, text_stream)
        spans = [SegmentSpan(0.0, window.seconds, 0, len(text), tuple(text))] if text else []
        text_stream.finish_part(
            WindowResult(
                window=window,
                attempt=attempt,
                quality=attempt.quality,
                spans=spans,
                words=(),
                text_tokens=text,
            )
        )

    async def _best_attempt(
        self, prompt: TokenArray, items: tuple[MediaItem, ...], seconds: float, text_stream: TextStream
    ) -> tuple[DecodingAttempt, list[int]]:
        """The first attempt that can be trusted, or the last one. Text that was sent is not replaced."""
        given = self._options.numbers.temperature
        for temperature in (given,) if given or self._options.beams else TEMPERATURES:
            params = self._params(len(prompt), seconds, temperature)
            request = GenerateRequest(prompt=prompt, params=params, items=items, deadline=self._options.deadline)
            attempt, text, answer = await self._attempt(request, text_stream)
            if text_stream.sent or not (attempt.limited or attempt.quality.failed):
                break
        self.language = self.language or answer.language
        return attempt, text

    async def _attempt(
        self, request: GenerateRequest, text_stream: TextStream
    ) -> tuple[DecodingAttempt, list[int], AnswerReader]:
        """The output of a request, and those of its tokens that are text."""
        audio_tokens, text = sum(item.length for item in request.items), list[int]()
        attempt = DecodingAttempt(request.params.temperature, len(request.prompt) - audio_tokens, audio_tokens)
        answer = reader_of(self._served, self._info, self._options)
        tokenizer = self._served.renderer.tokenizer
        detokenizer = Detokenizer(tokenizer.backend, (), TextParams())
        held_tokens, held_logprobs = list[int](), list[float]()
        async with aclosing(deltas_of(self._served.client, request, self._options, tokenizer)) as deltas:
            async for delta in deltas:
                logprobs = [entry.logprobs[0] for entry in delta.logprobs]
                attempt.output += delta.token_ids
                attempt.logprobs += logprobs
                attempt.end(delta.finish_reason, self._options)
                held_tokens += delta.token_ids
                held_logprobs += logprobs
                last = delta.finish_reason is not None
                shown = answer.push(held_tokens, last=last)
                if answer.waits:
                    continue
                tokens, probs = [held_tokens[index] for index in shown], [held_logprobs[index] for index in shown]
                text += tokens
                given = detokenizer.push(tokens, last=last)
                attempt.add_piece(given, token_logprobs(tokenizer, tokens, probs) if self._options.logprobs else ())
                held_tokens, held_logprobs = [], []
                if text_stream.live:
                    text_stream.send(attempt.pieces)
        return attempt, text, answer

    def _params(self, prompt_len: int, seconds: float, temperature: float) -> SamplingParams:
        options = self._options
        most = int(seconds * _TOKENS_PER_SECOND) + _MORE_TOKENS if options.max_tokens is None else options.max_tokens
        max_tokens = max(1, min(most, self._served.info.max_model_len - prompt_len))
        return sampling_params(options, temperature, max_tokens=max_tokens, eos_token_ids=self._served.eos_token_ids)
