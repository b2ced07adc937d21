"""Whether a decoded window can be trusted: whisper's thresholds (Radford et al. 2022)."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

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
