"""Low-rank products (LoRA, Hu et al. 2021) of several adapters in the same launches (Chen et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton.grouped_matmul import grouped_matmul, sort_pairs


def sort_rows(lora_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order of rows by adapter, and rows of each; see `quire.kernels.lora.SortedRows`."""
    return sort_pairs(lora_ids, count)


def add_lora(y: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, order: Tensor, totals: Tensor) -> Tensor:
    """See `quire.kernels.lora.add_lora`; x is of the weights' dtype, its last stride 1."""
    inner = torch.empty((len(x), lora_a.shape[1]), dtype=x.dtype, device=x.device)
    grouped_matmul(x, lora_a, inner, order, totals, kind="plain", gather=1, split=True)
    return grouped_matmul(inner, lora_b, y, order, totals, kind="plain", scatter=True, add=True)
