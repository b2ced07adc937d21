"""RMS norm as a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """Root mean square norm with a learned weight, to which `offset` is added."""

    def __init__(self, dim: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return rms_norm(x, self.weight, self.eps, self.offset)
