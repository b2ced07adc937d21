"""Norms as layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.engine.models.specs import decoder as spec
from quire.kernels.add_rms_norm import add_rms_norm
from quire.kernels.add_scaled import add_scaled
from quire.kernels.layer_norm import layer_norm
from quire.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """Root mean square norm with a learned weight, to which `offset` is added."""

    def __init__(self, dim: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalize the last dimension of x + residual."""
        return rms_norm(x if residual is None else x + residual, self.weight, self.eps, self.offset)


class LayerNorm(nn.Module):
    """Layer norm with a learned weight, and a bias where there is one."""

    def __init__(self, dim: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(dim), requires_grad=False) if bias else None
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalize the last dimension of x + residual."""
        return layer_norm(x, self.weight, self.bias, self.eps, residual)


def add_and_norm(norm: nn.Module, x: Tensor, branch: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """x + branch * scale, and the norm of it. All are (tokens, hidden)."""
    if isinstance(norm, RMSNorm):
        return add_rms_norm(x, branch, scale, norm.weight, norm.eps, norm.offset)
    total = add_scaled(x, branch, scale)
    return total, norm(total)


def make_norm(dim: int, norm: spec.Norm) -> RMSNorm | LayerNorm:
    """The layer of a norm over `dim` elements."""
    if isinstance(norm, spec.RMSNormSpec):
        return RMSNorm(dim, norm.eps, norm.offset)
    return LayerNorm(dim, norm.eps, bias=norm.bias)
