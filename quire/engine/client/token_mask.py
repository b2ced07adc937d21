"""Sets of token ids as bitmasks, whose size does not depend on the number of tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

TokenMask = NDArray[np.uint32]  # bit i % 32 of word i // 32 says whether token i is in the set
_WORD = 32


def token_mask(ids: NDArray[np.int32], vocab_size: int) -> TokenMask:
    """The bitmask of token ids (count,), all of them in [0, vocab_size)."""
    members = np.zeros(_words(vocab_size) * _WORD, np.bool_)
    members[ids] = True
    return np.packbits(members, bitorder="little").view(np.uint32)


def token_ids(mask: TokenMask) -> list[int]:
    """The ids in a mask, in ascending order."""
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids


def is_token_mask(mask: TokenMask, vocab_size: int) -> bool:
    """Whether an array is a mask with at least one token, and none outside the vocabulary."""
    if mask.dtype != np.uint32 or mask.shape != (_words(vocab_size),) or not mask.any():
        return False
    used = vocab_size % _WORD
    return not used or int(mask[-1]) >> used == 0


def has_other_token(mask: TokenMask, ids: Iterable[int]) -> bool:
    """Whether a mask has a token that is not among `ids`."""
    in_mask = sum(int(mask[token // _WORD]) >> token % _WORD & 1 for token in set(ids))
    return int(np.bitwise_count(mask).sum()) > in_mask


def _words(vocab_size: int) -> int:
    return -(-vocab_size // _WORD)
