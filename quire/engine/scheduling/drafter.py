"""Guesses the next tokens of a sequence from what it said before (n-gram speculation, "prompt lookup").

Source: A. Saxena, "Prompt Lookup Decoding", 2023. What is guessed is verified by the model in one step; the tokens that
come out are those that would have come without a guess.
"""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = (4, 3, 2)  # of n-grams; a longer match is the better guess
_FIRST = 4  # tokens of a sequence's first guess
_LONGEST_PAUSE = 64  # steps


class Drafter:
    """Drafts for one sequence. It knows all n-grams but the last one's future, and how often it was right lately."""

    def __init__(self, most: int) -> None:
        """`most`: tokens of a draft."""
        self._most = most
        self._length = min(_FIRST, most)
        self._pause = 1  # steps to wait after the next guess that is all wrong
        self._resting = 0
        self._known = 0
        self._following: dict[tuple[int, ...], int] = {}  # n-gram -> where its last occurrence goes on

    def draft(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        """What may follow `tokens`, at most `room` tokens; they are those of the last call and some more."""
        self._learn(tokens)
        if self._resting > 0:
            self._resting -= 1
            return ()
        count = min(self._length, room)
        for size in _SIZES:
            start = self._following.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if start is not None and count > 0:
                return _continued(tokens, start, count)
        return ()

    def judge(self, drafted: int, accepted: int) -> None:
        """Longer drafts after a wholly right one, none for a while after a wholly wrong one."""
        if accepted == drafted:
            self._length = min(self._most, 2 * self._length)
        else:
            self._length = max(1, min(self._most, accepted + 1))
        if accepted:
            self._pause = 1
        else:
            self._resting = self._pause
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause)

    def _learn(self, tokens: Sequence[int]) -> None:
        for end in range(max(1, self._known), len(tokens)):
            for size in _SIZES:
                if end >= size:
                    self._following[tuple(tokens[end - size : end])] = end
        self._known = len(tokens)


def _continued(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """Tokens from `start` on; behind the last one the draft goes on with itself, as a loop would."""
    draft = list(tokens[start : start + count])
    for index in range(count - len(draft)):
        draft.append(draft[index])
    return tuple(draft)
