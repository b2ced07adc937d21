"""Rows of logits held to what a grammar allows, and tokens drawn from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import native

Masks = NDArray[np.uint32]


def mask_words(vocab_size: int) -> int:
    """How many words of 32 bits the mask of a vocabulary takes."""
    return (vocab_size + 31) // 32


def _takes(logits: Tensor) -> bool:
    return native.supports(logits) and logits.dtype is torch.float32 and logits.is_contiguous()


def apply_token_bitmask(logits: Tensor, masks: Masks, pairs: Sequence[tuple[int, int]]) -> None:
    """Make tokens impossible that masks do not allow.

    Where nothing is left of what a mask allows, or something is no number, the mask wins: what it allows gets 0.

    Args:
        logits: (rows, vocab) float32, changed in place.
        masks: (rows, words); bit i % 32 of word i // 32 says whether token i may come.
        pairs: a row of logits and the row of its mask.
    """
    if _takes(logits):
        places = np.array(pairs, np.int64)
        native.kernels.apply_token_bitmask(
            logits.data_ptr(), masks.ctypes.data, places.ctypes.data, len(pairs), logits.shape[1], masks.shape[1]
        )
        return
    for row, mask in pairs:
        _hold_row(logits[row], masks[mask])


def _hold_row(logits: Tensor, mask: NDArray[np.uint32]) -> None:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)]
    forbidden = torch.from_numpy(bits == 0)
    logits.masked_fill_(forbidden, -torch.inf)
    if not logits.amax().item() > -torch.inf:
        logits.zero_().masked_fill_(forbidden, -torch.inf)


def argmax(logits: Tensor) -> list[int]:
    """The likeliest token of each row of logits (rows, vocab) float32; of equals the first."""
    if not _takes(logits):
        return logits.argmax(-1).tolist()
    return native.kernels.argmax(logits.data_ptr(), *logits.shape)


def sample(logits: Tensor, temperatures: Sequence[float], randoms: Sequence[float]) -> list[int]:
    """The tokens at which running sums of e^(logit / temperature) pass the random shares of their totals.

    Args:
        logits: (rows, vocab) float32.
        temperatures: one for each row, above 0.
        randoms: the same, in [0, 1).
    """
    if not _takes(logits):
        scaled = logits / torch.tensor(temperatures, dtype=torch.float32)[:, None]
        return invert(scaled.softmax(-1), torch.tensor(randoms, dtype=torch.float64))
    return native.kernels.sample(logits.data_ptr(), list(temperatures), list(randoms), *logits.shape)


def invert(probs: Tensor, randoms: Tensor) -> list[int]:
    """The tokens at which the running sums of unnormalised probabilities pass the random shares of their totals."""
    sums = probs.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(sums, randoms[:, None] * sums[:, -1:], right=True)[:, 0]
    return tokens.clamp_(max=probs.shape[-1] - 1).tolist()
