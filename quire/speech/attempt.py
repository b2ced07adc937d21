"""Decoding attempts at a window: their requests, their results, and whether these can be trusted.

The thresholds are whisper's (Radford et al. 2022).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from quire.engine.client.engine import Engine
from quire.engine.client.protocol import FinishReason
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.stream import Delta, GenerateRequest
from quire.multimodal.audio.cuts import Window
from quire.rendering.tokenizer import Tokenizer
from quire.serving.beams.collect import best_answer
from quire.serving.beams.options import BeamOptions
from quire.speech.segments import SegmentSpan
from quire.speech.types import TokenLogprob, TranscriptDelta, TranscriptionOptions, Word

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # tried one after the other
_MAX_COMPRESSION = 2.4  # text that compresses better repeats itself
_MIN_LOGPROB = -1.0  # mean of all tokens
_NO_SPEECH = 0.6
DOUBTFUL = math.log(2 / 3)  # of a token of a word: it is less than twice as likely as all others together


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality measures of one decoding attempt.

    Attributes:
        avg_logprob: mean log-probability of its tokens, with the end.
        no_speech_prob: probability that the window contains no speech; 0 for models that do not give it.
    """

    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float

    @property
    def silent(self) -> bool:
        """Whether there is no speech, so that the text is a hallucination."""
        return self.no_speech_prob > _NO_SPEECH and self.avg_logprob < _MIN_LOGPROB

    @property
    def repeats(self) -> bool:
        """Whether the text repeats itself."""
        return self.compression_ratio > _MAX_COMPRESSION

    @property
    def trusted(self) -> bool:
        """Whether the text can be taken for what was said."""
        return not self.silent and not self.failed

    @property
    def failed(self) -> bool:
        """Whether the window should be decoded again at a higher temperature."""
        return not self.silent and (self.repeats or self.avg_logprob < _MIN_LOGPROB)


def probably_silent(no_speech_prob: float) -> bool:
    """Whether text should be held until it is known how likely it is."""
    return no_speech_prob > _NO_SPEECH


def compression_ratio(text: str) -> float:
    """How many times smaller zlib makes a text; 0 for no text."""
    content = text.strip().encode(errors="replace")
    return len(content) / len(zlib.compress(content)) if content else 0.0


def sampling_params(
    options: TranscriptionOptions, temperature: float, *, max_tokens: int, eos_token_ids: tuple[int, ...]
) -> SamplingParams:
    """How the text of a window is sampled; the log-probability of each token is reported."""
    return SamplingParams(
        **{**msgspec.structs.asdict(options.numbers), "temperature": temperature},
        max_tokens=max_tokens,
        seed=options.seed,
        eos_token_ids=eos_token_ids,
        logprobs=0,
    )


def deltas_of(
    client: Engine,
    request: GenerateRequest,
    options: TranscriptionOptions,
    tokenizer: Tokenizer,
    forbids: Callable[[int, int], bool] | None = None,
) -> AsyncGenerator[Delta, None]:
    """The output of a request. With beam search it is one delta.

    Args:
        client: client of the engine.
        request: the request.
        options: options of the transcription.
        tokenizer: the model's tokenizer.
        forbids: see `BeamOptions`; otherwise the request's sampling parameters say which tokens are allowed.
    """
    if not options.beams:
        return client.generate(request)
    ends = frozenset(request.params.eos_token_ids)
    beams = BeamOptions(options.beams, options.length_penalty, ends, frozenset(), 0, forbids)
    return best_answer(client, request, beams, tokenizer)


def token_logprobs(tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of tokens, with their texts."""
    return tuple(
        TokenLogprob(tokenizer.token_text(token), logprob, tokenizer.token_bytes(token))
        for token, logprob in zip(tokens, logprobs, strict=True)
    )


@dataclass(slots=True)
class DecodingAttempt:
    """The output of one request to the engine.

    Attributes:
        prompt_tokens: tokens of the prompt.
        audio_tokens: positions of the encoder that hold audio.
        output: all tokens, with timestamps and the end.
        pieces: pieces of the text, in order.
        limited: whether it ended because there was no room for more tokens.
        truncated: whether it ended at the `max_tokens` of the options.
    """

    temperature: float
    prompt_tokens: int = 0
    audio_tokens: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pieces: list[TranscriptDelta] = field(default_factory=list)
    no_speech_prob: float = 0.0
    limited: bool = False
    truncated: bool = False
    _counted: int = 0  # tokens of the output that are counted in pieces

    def add_piece(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        """Append a piece of the text, unless it is empty. It counts the tokens of the output so far."""
        if text or logprobs:
            self.pieces.append(self._piece(text, logprobs))
            self._counted = len(self.output)

    def discard(self) -> None:
        """Drop the output, which is not the text of the audio."""
        self.output, self.logprobs, self.pieces, self._counted = [], [], [], 0

    @property
    def uncounted(self) -> TranscriptDelta:
        """An empty piece with the numbers of tokens that no piece has counted."""
        return self._piece("")

    def _piece(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> TranscriptDelta:
        input_tokens = 0 if self.pieces else self.prompt_tokens + self.audio_tokens
        return TranscriptDelta(
            text, logprobs, input_tokens=input_tokens, output_tokens=len(self.output) - self._counted
        )

    def end(self, finish_reason: FinishReason | None, options: TranscriptionOptions) -> None:
        """Note why the request has ended, if it has."""
        if finish_reason == "length":
            self.limited = options.max_tokens is None
            self.truncated = not self.limited

    @property
    def text(self) -> str:
        """The text of all pieces."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def quality(self) -> Quality:
        """Figures by which it is judged."""
        mean = sum(self.logprobs) / len(self.logprobs) if self.logprobs else 0.0
        return Quality(mean, compression_ratio(self.text), self.no_speech_prob)


@dataclass(frozen=True, slots=True)
class WindowResult:
    """The transcription of a window or a part of it. `words` have the index of the token they begin with."""

    window: Window
    attempt: DecodingAttempt
    quality: Quality
    spans: Sequence[SegmentSpan]
    words: Sequence[tuple[int, Word]]
    text_tokens: Sequence[int]
