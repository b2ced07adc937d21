"""Token ids that only the device knows: the tokens that were sampled last."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import gpu


def fill_last_tokens(token_ids: Tensor, last_tokens: Tensor) -> None:
    """Replace each negative id -1 - row by the last token of that row.

    Args:
        token_ids: (tokens,) int64, changed in place.
        last_tokens: (rows,) int64.
    """
    if gpu.supports(token_ids, last_tokens):
        from quire.kernels.triton import last_tokens as kernel

        kernel.fill_last_tokens(token_ids, last_tokens)
        return
    reference(token_ids, last_tokens)


def reference(token_ids: Tensor, last_tokens: Tensor) -> None:
    """`fill_last_tokens` in torch."""
    last = last_tokens[(-1 - token_ids).clamp(min=0)]
    token_ids.copy_(torch.where(token_ids < 0, last, token_ids))
