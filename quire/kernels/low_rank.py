"""Low-rank products that are added to the result of a linear layer (LoRA), on GPUs."""

from __future__ import annotations

import torch
from torch import Tensor


def add_low_rank(y: Tensor, x: Tensor, down: Tensor, up: Tensor, rows: Tensor | None) -> Tensor:
    """y + up (down x) for some rows; y is changed.

    Args:
        y: (tokens, size_out).
        x: (tokens, size_in).
        down: (rank, size_in).
        up: (size_out, rank), times the adapter's scale.
        rows: (n,) int64; None: all.

    Returns:
        y.
    """
    from quire.kernels.triton.lora import add_low_rank as kernel

    if rows is None:
        adapters = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    else:
        adapters = torch.full((len(x),), -1, dtype=torch.int32, device=x.device).index_fill_(0, rows, 0)
    return kernel(y, x if x.stride(1) == 1 else x.contiguous(), down[None], up[None], adapters)
