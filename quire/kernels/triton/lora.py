"""Low-rank products (LoRA, Hu et al. 2021) of several adapters in the same launches (Chen et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton.grouped_matmul import grouped_matmul, sort_pairs


def add_low_rank(y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor) -> Tensor:
    """y + up_a (down_a x) for rows with an adapter a; y is changed.

    Args:
        y: (rows, size_out), last stride 1.
        x: (rows, size_in) of the weights' dtype, last stride 1.
        down: (adapters, rank, size_in).
        up: (adapters, size_out, rank), times the adapters' scales. Ranks that an adapter does not have are zero.
        adapters: (rows,) integers; -1: the row has none.

    Returns:
        y.
    """
    order, totals = sort_pairs(adapters, len(down))
    inner = torch.empty((len(x), down.shape[1]), dtype=x.dtype, device=x.device)
    grouped_matmul(x, down, inner, order, totals, kind="plain", gather=1, split=True)
    return grouped_matmul(inner, up, y, order, totals, kind="plain", scatter=True, add=True)
