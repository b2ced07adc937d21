"""Sums of rows in double precision, for the mean of hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import native


def add_rows(x: Tensor, total: Tensor) -> None:
    """Add all rows of x (rows, dim) to `total` (dim,) float64, which is changed in place."""
    if x.dim() == 2 and native.supports(x):
        native.kernels.add_rows(x=x, sum=total)
        return
    total += x.sum(0, dtype=torch.float64)
