"""Root mean square norm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (weight + offset) over the last dimension, computed in float32, in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if x.dtype == torch.float32:
        return wide * (weight + offset if offset else weight)
    return (wide * (weight.float() + offset)).to(x.dtype) if offset else weight * wide.to(x.dtype)
