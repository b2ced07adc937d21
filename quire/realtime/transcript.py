"""Transcripts of utterances, and the log-probabilities of a part of one."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from quire.speech.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and duration of a transcribed utterance.

    Attributes:
        seconds: duration of the audio in seconds.
        audio_tokens, text_tokens: numbers of prompt tokens.
        output_tokens: generated.
    """

    seconds: float
    audio_tokens: int = 0
    text_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.seconds + other.seconds,
            self.audio_tokens + other.audio_tokens,
            self.text_tokens + other.text_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class Transcript:
    """The transcript of an utterance.

    Attributes:
        language: language code, if the model has detected it.
        logprobs: log-probabilities of the tokens of the text; None: they were not requested.
    """

    text: str
    usage: Usage
    language: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None

    def logprobs_between(self, start: int, end: int) -> tuple[TokenLogprob, ...] | None:
        """Log-probabilities of the tokens that begin in `text[start:end]`; None: they were not requested."""
        if self.logprobs is None:
            return None
        last = len(self.text)
        begins = token_starts(self.logprobs, self.text)
        return tuple(
            token
            for token, at in zip(self.logprobs, begins, strict=True)
            if start <= at < end or (at == end == last and start < end)
        )


def token_starts(tokens: Sequence[TokenLogprob], text: str) -> list[int]:
    """The index in `text` at which each token begins.

    The bytes of all tokens are the text, except that white space may be missing on either side: it is removed at the
    ends of the text, and added between the windows of long audio.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts = list[int]()
    at = 0
    for token in tokens:
        starts.append(at)
        for char in decoder.decode(token.bytes):
            if char.isspace():
                at += text[at : at + 1].isspace()
                continue
            while text[at : at + 1].isspace():
                at += 1
            at = min(at + 1, len(text))
    return starts
