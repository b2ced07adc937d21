"""Which words of a transcript that is still changing can be told already."""

from __future__ import annotations

import re

# Scripts without spaces between words, in which each character is a unit: Thai, Lao, Burmese, Khmer, kana, ideographs.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3001-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uff1f"
_UNIT = re.compile(rf"\s*(?:[{_UNSPACED}]|[^\s{_UNSPACED}]+)")
_NO_SPACE = re.compile(f"[{_UNSPACED}]")
_UNHEARD = re.compile(r"[\W_]+")


class StablePrefix:
    """Agreement of successive passes over a growing utterance.

    A word is stable once two passes in a row have the same words up to it, whatever their case and punctuation. What
    has been told is never taken back: `rest` of the final transcript begins behind as many words.
    """

    def __init__(self) -> None:
        self._previous: list[str] = []
        self._told: list[str] = []

    @property
    def told(self) -> str:
        """The text so far."""
        return "".join(self._told)

    def agreed(self, transcript: str) -> list[str]:
        """The words that have become stable by the transcript of another pass. They are told by `tell`."""
        units = split(transcript)
        common = _common(self._previous, units)
        self._previous = units
        return units[len(self._told) : common]

    def tell(self, words: list[str]) -> None:
        """The client has these words as well."""
        self._told += words

    def rest(self, transcript: str) -> str:
        """What follows the told words in the final transcript. A word that it has elsewhere is not told twice."""
        units = split(transcript)
        return "".join(units[_behind([_heard(u) for u in self._told], [_heard(u) for u in units]) :])


def split(text: str) -> list[str]:
    """Words with the space before them; characters, where a script has no spaces."""
    return _UNIT.findall(text)


def separator(before: str, after: str) -> str:
    """What goes between two texts: a space, unless one of them is empty or has it, or their script has no spaces."""
    if not before or not after or before[-1].isspace() or after[0].isspace():
        return ""
    return "" if _NO_SPACE.match(before[-1]) and _NO_SPACE.match(after[0]) else " "


def _heard(unit: str) -> str:
    return _UNHEARD.sub("", unit).casefold()


def _common(first: list[str], second: list[str]) -> int:
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if _heard(one) != _heard(other):
            return index
    return min(len(first), len(second))


def _behind(told: list[str], final: list[str]) -> int:
    """The number of words at the start of `final` that best match `told`, by edit distance."""
    costs = list(range(len(final) + 1))
    for row, word in enumerate(told, 1):
        diagonal, costs[0] = costs[0], row
        for column, other in enumerate(final, 1):
            diagonal, costs[column] = (
                costs[column],
                min(diagonal + (word != other), costs[column] + 1, costs[column - 1] + 1),
            )
    best = min(costs)
    return max(index for index, cost in enumerate(costs) if cost == best)
