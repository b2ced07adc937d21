"""Finds the words of an interim transcript that are stable enough to be sent."""

from __future__ import annotations

import re

# Scripts without spaces between words, in which each character is a unit: Thai, Lao, Burmese, Khmer, kana, ideographs.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3001-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uff1f"
_UNIT = re.compile(rf"\s*(?:[{_UNSPACED}]|[^\s{_UNSPACED}]+)")
_NO_SPACE = re.compile(f"[{_UNSPACED}]")
_NOT_SPOKEN = re.compile(r"[\W_]+")


class StablePrefix:
    """The common prefix of successive interim transcripts of an utterance.

    A word is stable once two transcripts in a row have the same words up to it, ignoring case and punctuation.
    Words that were sent are never retracted: `remaining` gives the part of the final transcript that follows them.
    """

    def __init__(self) -> None:
        self._previous: list[str] = []
        self._sent: list[str] = []

    @property
    def sent(self) -> str:
        """The text that was sent."""
        return "".join(self._sent)

    def stable_words(self, transcript: str) -> list[str]:
        """The words that have become stable with this transcript and were not sent; see `record_sent`."""
        units = split(transcript)
        common = _common(self._previous, units)
        self._previous = units
        return units[len(self._sent) : common]

    def sent_until(self, transcript: str) -> int:
        """The index in an interim transcript behind the words that correspond to the sent ones."""
        return len("".join(split(transcript)[: len(self._sent)]))

    def record_sent(self, words: list[str]) -> None:
        """Record that these words were sent."""
        self._sent += words

    def remaining(self, transcript: str) -> str:
        """The part of the final transcript that follows the sent words, which are aligned with it by edit distance."""
        units = split(transcript)
        return "".join(units[_aligned_length([_normalized(u) for u in self._sent], [_normalized(u) for u in units]) :])


def split(text: str) -> list[str]:
    """Words with the space before them; characters, where a script has no spaces."""
    return _UNIT.findall(text)


def separator(before: str, after: str) -> str:
    """The separator of two texts: a space, unless one of them is empty or has it, or their script has no spaces."""
    if not before or not after or before[-1].isspace() or after[0].isspace():
        return ""
    return "" if _NO_SPACE.match(before[-1]) and _NO_SPACE.match(after[0]) else " "


def _normalized(unit: str) -> str:
    return _NOT_SPOKEN.sub("", unit).casefold()


def _common(first: list[str], second: list[str]) -> int:
    for index, (word, other) in enumerate(zip(first, second, strict=False)):
        if _normalized(word) != _normalized(other):
            return index
    return min(len(first), len(second))


def _aligned_length(sent: list[str], final: list[str]) -> int:
    """The number of words at the start of `final` that best match `sent`, by edit distance."""
    costs = list(range(len(final) + 1))
    for row, word in enumerate(sent, 1):
        diagonal = costs[0]
        costs[0] = row
        for column, other in enumerate(final, 1):
            diagonal, costs[column] = (
                costs[column],
                min(diagonal + (word != other), costs[column] + 1, costs[column - 1] + 1),
            )
    best = min(costs)
    return max(index for index, cost in enumerate(costs) if cost == best)
