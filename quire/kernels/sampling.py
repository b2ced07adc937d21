"""Token bitmasks over logits, and tokens chosen from logits, on the CPU.

Those of logits that stay on another device: `quire.kernels.token_bitmask` and `choose_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import native

Masks = NDArray[np.uint32]
NO_TOKEN = -1  # of a row with NaN, or whose largest logit is infinite


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits in the bitmask of a vocabulary."""
    return (vocab_size + 31) // 32


def _is_supported(logits: Tensor) -> bool:
    return native.supports(logits) and logits.dtype is torch.float32 and logits.is_contiguous()


def apply_token_bitmask(logits: Tensor, masks: Masks, pairs: Sequence[tuple[int, int]]) -> None:
    """Set the logits of tokens to -inf that a bitmask does not allow.

    If the logits of all allowed tokens are -inf, the mask alone decides: all of them become 0. NaN stays NaN.

    Args:
        logits: (rows, vocab) float32, changed in place.
        masks: (masks, words); bit i % 32 of word i // 32 says whether token i is allowed.
        pairs: rows of logits, each with the row of its mask.
    """
    if _is_supported(logits):
        native.kernels.apply_token_bitmask(
            logits=logits,
            masks=torch.from_numpy(masks.view(np.int32)),
            pairs=torch.from_numpy(np.array(pairs, np.int64).reshape(-1, 2)),
        )
        return
    for row, mask in pairs:
        _mask_row(logits[row], masks[mask])


def _mask_row(logits: Tensor, mask: NDArray[np.uint32]) -> None:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)]
    forbidden = torch.from_numpy(bits == 0)
    logits.masked_fill_(forbidden & ~logits.isnan(), -torch.inf)
    if logits.amax().item() == -torch.inf:
        logits.zero_().masked_fill_(forbidden, -torch.inf)


def argmax(logits: Tensor) -> list[int]:
    """The token with the largest logit in each row of logits (rows, vocab) float32; the first of equal ones.

    `NO_TOKEN` for a row without a valid one.
    """
    if not _is_supported(logits):
        return logits.argmax(-1).where(has_token(logits), NO_TOKEN).tolist()
    tokens: list[int] = native.kernels.argmax(logits=logits)
    return tokens


def sample(logits: Tensor, temperatures: Sequence[float], randoms: Sequence[float]) -> list[int]:
    """A random token for each row: the one where the running sum of e^(logit / temperature) exceeds random * total.

    `NO_TOKEN` for a row without a valid one.

    Args:
        logits: (rows, vocab) float32.
        temperatures: one per row, above 0.
        randoms: one per row, in [0, 1).
    """
    if not _is_supported(logits):
        scaled = logits / torch.tensor(temperatures, dtype=torch.float32)[:, None]
        return sample_by_inverse_cdf(scaled.softmax(-1), torch.tensor(randoms, dtype=torch.float64), has_token(logits))
    tokens: list[int] = native.kernels.sample(logits=logits, temperatures=list(temperatures), randoms=list(randoms))
    return tokens


def has_token(logits: Tensor) -> Tensor:
    """Whether each row of logits (rows, vocab) has a token: its largest logit is neither NaN nor infinite."""
    return logits.amax(-1) < torch.inf


def sample_by_inverse_cdf(probs: Tensor, randoms: Tensor, valid: Tensor) -> list[int]:
    """For each row of unnormalized probabilities, the token where the running sum exceeds random * total.

    `valid`: (rows,) whether a row has a token; `NO_TOKEN` for the others.
    """
    sums = probs.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(sums, randoms[:, None] * sums[:, -1:], right=True)[:, 0]
    return tokens.clamp_(max=probs.shape[-1] - 1).where(valid, NO_TOKEN).tolist()
