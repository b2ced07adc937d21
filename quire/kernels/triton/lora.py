"""Low-rank products (LoRA, Hu et al. 2021) of several adapters in the same launches (Chen et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton.grouped_matmul import grouped_matmul, sort_pairs


def sort_rows(adapters: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order of rows by adapter, and rows of each; see `quire.kernels.low_rank.SortedRows`."""
    return sort_pairs(adapters, count)


def add_low_rank(y: Tensor, x: Tensor, down: Tensor, up: Tensor, order: Tensor, totals: Tensor) -> Tensor:
    """See `quire.kernels.low_rank.add_low_rank`; x is of the weights' dtype, its last stride 1."""
    inner = torch.empty((len(x), down.shape[1]), dtype=x.dtype, device=x.device)
    grouped_matmul(x, down, inner, order, totals, kind="plain", gather=1, split=True)
    return grouped_matmul(inner, up, y, order, totals, kind="plain", scatter=True, add=True)
