"""Finds stop strings in a text that is still arriving, in time proportional to the new text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """The stop strings of one sequence, matched by the algorithm of Knuth, Morris and Pratt.

    Attributes:
        held: length of the longest end of the text so far that may begin a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop string that the text ends with
        self.held = 0

    def push(self, text: str) -> tuple[int, str] | None:
        """Append text; returns where the stop string that it completes begins, from the new text on, and that string.

        Of several stop strings, the one that begins first is returned; if two begin together, the first alphabetically.
        """
        matches = [
            (end - len(stop), stop) for i, (stop, _) in enumerate(self._stops) if (end := self._advance(i, text)) > 0
        ]
        self.held = max(self._matched, default=0)
        return min(matches, default=None)

    def _advance(self, index: int, text: str) -> int:
        """Match one stop string against new text; returns the end of the first match in it, 0 if there is none."""
        stop, borders = self._stops[index]
        matched, end, first = self._matched[index], len(stop), stop[0]
        first_end = position = 0
        while position < len(text):
            if not matched:  # nearly always: skip to where the stop string may begin
                position = text.find(first, position)
                if position < 0:
                    break
            char = text[position]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            matched += stop[matched] == char
            position += 1
            if matched == end:
                first_end = first_end or position
                matched = borders[-1]
        self._matched[index] = matched
        return first_end


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """For each beginning of a stop string the length of its longest proper beginning that it also ends with."""
    borders = [0]
    for char in stop[1:]:
        size = borders[-1]
        while size and stop[size] != char:
            size = borders[size - 1]
        borders.append(size + (stop[size] == char))
    return tuple(borders)
