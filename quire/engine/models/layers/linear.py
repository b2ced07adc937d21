"""Linear layers. Projections of the same input lie in one weight, side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T + b, where the rows of W are the outputs of one or more projections.

    Attributes:
        parts: rows of each projection, in order.
    """

    def __init__(self, size_in: int, *parts: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts), size_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(parts)), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, size_in) to (tokens, sum(parts))."""
        return F.linear(x, self.weight, self.bias)
