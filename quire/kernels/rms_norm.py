"""Root mean square norm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (weight + offset) over the last dimension, computed in float32, in x's dtype."""
    if x.dim() == 2 and native.supports(x, weight):
        return _native(x, weight, eps, offset)
    return reference(x, weight, eps, offset)


def reference(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """In torch."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if x.dtype == torch.float32:
        return wide * (weight + offset if offset else weight)
    return (wide * (weight.float() + offset)).to(x.dtype) if offset else weight * wide.to(x.dtype)


def _native(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    out = empty(x.shape, x.dtype)
    native.kernels.rms_norm(
        native.CODES[x.dtype], x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0), x.shape[1],
        eps, offset,
    )  # fmt: skip
    return out
