"""Where the states of a prompt are saved."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np

from quire.engine.client.protocol import TokenArray

# Tokens between two snapshots at least. Each costs a step, which takes about as long as so many tokens.
_LEAST = 32
_BEHIND_FIRST = 128  # the same for the end of the first message
_BETWEEN_MESSAGES = 256  # for those in the middle of a prompt
_FIRST_GROWING = 512  # position of the first of those at growing distances


def message_ends(tokens: TokenArray, end_tokens: Sequence[int]) -> list[int]:
    """Return the positions behind the messages of a chat, which its template ends with a token that also ends answers.

    `end_tokens`: those that end an answer.
    """
    if not end_tokens:
        return []
    is_end = np.isin(tokens, np.array(end_tokens, np.int32))
    is_end[:-1] &= ~is_end[1:]  # the last of several
    return [int(position) + 1 for position in is_end.nonzero()[0]]


def is_growing(position: int, block_size: int) -> bool:
    """Return whether a position is one of those at growing distances."""
    first = -(-_FIRST_GROWING // block_size) * block_size
    multiple = position // first
    return multiple > 0 and position % first == 0 and multiple & (multiple - 1) == 0


def choose_borders(
    length: int, computed: int, block_size: int, ends: Sequence[int], parted: Iterable[int] = ()
) -> list[int]:
    """Return the positions behind which the states of a prompt are saved, in order. They are borders of blocks.

    Args:
        length: tokens of the prompt.
        computed: those that are cached; there is a snapshot behind them, if there are any.
        block_size: tokens of a block.
        ends: positions behind its messages.
        parted: positions at which it differs from prompts before it, or a later one is expected to; best first.
    """
    last = (length - 1) // block_size * block_size  # a token has to be left to compute
    least = max(_LEAST, block_size)
    borders: list[int] = [computed]

    def add(position: int, distance: int) -> None:
        border = min(position, last) // block_size * block_size
        at = bisect_left(borders, border)
        neighbours = borders[max(0, at - 1) : at + 1]
        if border > computed and all(abs(border - neighbour) >= distance for neighbour in neighbours):
            insort(borders, border)

    for position in parted:
        add(position, least)
    if ends:
        add(ends[-1], least)  # before what the template writes in front of the answer, which may not stay
    add(last, least)
    if ends:
        add(ends[0], max(least, _BEHIND_FIRST))
    position = -(-_FIRST_GROWING // block_size) * block_size
    while position <= last:
        add(position, max(least, _BETWEEN_MESSAGES))
        position *= 2
    for position in reversed(ends):
        add(position, _BETWEEN_MESSAGES)
    return borders[1:]
