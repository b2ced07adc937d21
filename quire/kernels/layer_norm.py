"""Layer norm (Ba, Kiros and Hinton 2016)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalize the last dimension of x + residual, with statistics in float32; the result has x's dtype."""
    return reference(x, weight, bias, eps, residual)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None) -> Tensor:
    """`layer_norm` in torch."""
    summed = x if residual is None else x + residual
    if x.dtype == torch.float32:
        return F.layer_norm(summed, (x.shape[-1],), weight.float(), None if bias is None else bias.float(), eps)
    return F.layer_norm(summed, (x.shape[-1],), weight.to(x.dtype), None if bias is None else bias.to(x.dtype), eps)
