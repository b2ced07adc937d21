"""Bitmasks over logits that are on the logits' device."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import gpu

_WORD = 32


def mask_logits(logits: Tensor, masks: Tensor, mask_of_row: Tensor) -> None:
    """Set the logits of tokens to -inf that a row's mask does not allow.

    If the logits of all allowed tokens are -inf, the mask alone decides: all of them become 0. NaN stays NaN.

    Args:
        logits: (rows, vocab) float32, changed in place.
        masks: (masks, words) int32; bit i % 32 of word i // 32 says whether token i is allowed.
        mask_of_row: (rows,) int32 the mask of each row; -1 for none.
    """
    if gpu.supports(logits, masks, mask_of_row) and logits.stride(1) == 1:
        from quire.kernels.triton import token_bitmask as kernel

        kernel.mask_logits(logits, masks, mask_of_row)
        return
    reference(logits, masks, mask_of_row)


def reference(logits: Tensor, masks: Tensor, mask_of_row: Tensor) -> None:
    """`mask_logits` in torch."""
    masked = (mask_of_row >= 0)[:, None]
    ids = torch.arange(logits.shape[1], device=logits.device)
    words = masks[mask_of_row.clamp(min=0).long()][:, ids // _WORD]
    forbidden = masked & (words >> (ids % _WORD) & 1 == 0)
    logits.masked_fill_(forbidden & ~logits.isnan(), -torch.inf)
    invalid = masked & (logits.amax(-1, keepdim=True) == -torch.inf)
    logits.masked_fill_(invalid & ~forbidden, 0.0)
