"""Drafts the next tokens of a sequence from its earlier tokens (n-gram speculation, "prompt lookup").

Source: A. Saxena, "Prompt Lookup Decoding", 2023. The model verifies a draft in one step; the resulting tokens are
those that would have been sampled without it.
"""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = (4, 3, 2)  # of n-grams; a longer match predicts better
_FIRST_LENGTH = 4  # tokens of a sequence's first draft
_MAX_PAUSE = 64  # steps


class Drafter:
    """Drafts for one sequence. The draft length adapts to how many tokens were accepted lately."""

    def __init__(self, max_length: int) -> None:
        """`max_length`: most tokens of a draft."""
        self._max_length = max_length
        self._length = min(_FIRST_LENGTH, max_length)
        self._pause = 1  # steps without a draft after the next draft that is rejected as a whole
        self._pause_left = 0
        self._indexed = 0  # tokens whose n-grams are in the index
        self._following: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence

    def draft(self, tokens: Sequence[int], room: int) -> tuple[int, ...]:
        """At most `room` tokens that may follow `tokens`, which extend those of the previous call."""
        self._index(tokens)
        if self._pause_left > 0:
            self._pause_left -= 1
            return ()
        count = min(self._length, room)
        for size in _SIZES:
            start = self._following.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if start is not None and count > 0:
                return _continued(tokens, start, count)
        return ()

    def update(self, drafted: int, accepted: int) -> None:
        """Adapt to a verified draft: double the length if all was accepted, pause if nothing was."""
        if accepted == drafted:
            self._length = min(self._max_length, 2 * self._length)
        else:
            self._length = max(1, min(self._max_length, accepted + 1))
        if accepted:
            self._pause = 1
        else:
            self._pause_left = self._pause
            self._pause = min(_MAX_PAUSE, 2 * self._pause)

    def _index(self, tokens: Sequence[int]) -> None:
        for end in range(max(1, self._indexed), len(tokens)):
            for size in _SIZES:
                if end >= size:
                    self._following[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)


def _continued(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; past the last known token the draft repeats itself."""
    draft = list(tokens[start : start + count])
    for index in range(count - len(draft)):
        draft.append(draft[index])
    return tuple(draft)
