"""Transcribes windows with CTC models: the likeliest token of each position becomes text and words."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.engine import Engine
from quire.engine.client.model_info import Transcribes
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import PooledArray
from quire.engine.client.stream import PoolRequest
from quire.multimodal.audio.cuts import Window
from quire.multimodal.audio.items import make_item
from quire.multimodal.audio.reader import AudioReader
from quire.rendering.tokenizer import Tokenizer
from quire.speech.aligned_words import AlignedToken, align_words, segment_words, timed_words
from quire.speech.attempt import DecodingAttempt, WindowResult, token_logprobs
from quire.speech.types import TranscriptionOptions
from quire.speech.windows import TextStream

_NO_TOKENS = np.zeros(0, np.int32)


def collapse(positions: PooledArray, blank: int) -> list[AlignedToken]:
    """The tokens in the most likely path: equal neighbours are one token, blanks are none.

    Args:
        positions: (positions, 2), see the task "ctc" of `PoolingParams`.
        blank: the token that stands for no text.
    """
    if not len(positions):
        return []
    tokens = positions[:, 0].astype(np.int64)
    starts = np.flatnonzero(np.concatenate([[True], tokens[1:] != tokens[:-1]]))
    ends = [*starts[1:].tolist(), len(tokens)]
    logprobs = np.maximum.reduceat(positions[:, 1], starts)
    runs = zip(tokens[starts].tolist(), logprobs.tolist(), starts.tolist(), ends, strict=True)
    return [AlignedToken(*run) for run in runs if run[0] != blank]


class CTCWindowTranscriber:
    """Transcribe windows with a CTC model, which does not report a language; implements `WindowTranscriber`."""

    def __init__(
        self,
        client: Engine,
        reader: AudioReader,
        tokenizer: Tokenizer,
        info: Transcribes,
        options: TranscriptionOptions,
        tenant: str,
    ) -> None:
        self._client = client
        self._reader = reader
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_tokens.values())
        self._info = info
        self._options = options
        self._tenant = tenant
        self._flow = uuid.uuid4().hex  # of all windows, so that a long file does not hold up a short one
        self.language: str | None = None

    async def prepare(self, audio: NDArray[np.float32], windows: Sequence[Window]) -> None:
        """Do nothing: a CTC model has no prompt."""

    async def transcribe(self, audio: NDArray[np.float32], window: Window, text_stream: TextStream) -> None:
        """Transcribe a window by one request for the most likely token at each position."""
        samples = audio[window.start : window.end]
        item = await self._reader.run(partial(make_item, samples, self._info), tenant=self._tenant)
        request = PoolRequest(
            prompt=_NO_TOKENS,
            params=PoolingParams(task="ctc"),
            items=(item,),
            deadline=self._options.deadline,
            flow=self._flow,
        )
        positions = (await self._client.pool(request)).data
        text_stream.finish_part(await self._reader.run(partial(self._result, positions, window), tenant=self._tenant))

    def _result(self, positions: NDArray[np.float32], window: Window) -> WindowResult:
        info = self._info
        assert info.blank_token is not None
        placed = collapse(positions, info.blank_token)
        text_tokens = [placed_token for placed_token in placed if placed_token.token not in self._special]
        tokens = text_tokens[: self._options.max_tokens]
        contents = [self._tokenizer.token_bytes(placed_token.token) for placed_token in tokens]
        spaced = self._tokenizer.separates_words
        words = align_words(tokens, contents, info.time_precision, window.seconds, spaced=spaced)
        ids = [placed_token.token for placed_token in tokens]
        logprobs = [placed_token.logprob for placed_token in tokens]
        attempt = DecodingAttempt(0.0, audio_tokens=len(positions), output=ids, logprobs=logprobs)
        attempt.truncated = len(tokens) < len(text_tokens)
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        reports_logprobs = text and self._options.logprobs
        attempt.add_piece(text, token_logprobs(self._tokenizer, ids, logprobs) if reports_logprobs else ())
        return WindowResult(
            window=window,
            attempt=attempt,
            quality=attempt.quality,
            spans=segment_words(words, tokens),
            words=timed_words(words, window.offset) if self._options.words else (),
            text_tokens=ids,
        )
