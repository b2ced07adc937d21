"""Linear layers. Projections of the same input lie in one weight, side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.linear import pack, packed_linear, packs


class Linear(nn.Module):
    """y = x W^T + b, where the rows of W are the outputs of one or more projections.

    Attributes:
        parts: rows of each projection, in order.
    """

    def __init__(self, size_in: int, *parts: int, bias: bool = False, packable: bool = True) -> None:
        """`packable`: nobody else reads the weight, so it may lie as the kernels like it."""
        super().__init__()
        self.parts = parts
        self.packable = packable
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(sum(parts), size_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(parts)), requires_grad=False) if bias else None
        self.packed: Tensor | None
        self.register_buffer("packed", None, persistent=False)

    def settle(self) -> None:
        """Take the form that is fastest here; to be called once weight and bias are known."""
        if self.weight is None or not self.packable or not packs(self.weight):
            return
        self.packed, self.weight = pack(self.weight), None
        if self.bias is not None:
            self.bias.data = self.bias.data.float()

    def forward(self, x: Tensor, *, wide: bool = False) -> Tensor:
        """(tokens, size_in) to (tokens, sum(parts)), in float32 if `wide`."""
        if self.packed is not None:
            return packed_linear(x, self.packed, sum(self.parts), self.bias, wide=wide)
        assert self.weight is not None
        out = F.linear(x, self.weight, self.bias)
        return out.float() if wide else out
