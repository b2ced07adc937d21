"""Sums of residual branches, and products with a constant."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty


def scaled(x: Tensor, scale: float, *, rounded: bool = True) -> Tensor:
    """x * scale, where the scale is rounded to x's dtype first unless it is said otherwise, as in transformers."""
    if scale == 1.0:
        return x
    factor = _round_to_dtype(scale, x.dtype) if rounded else scale
    if not (native.supports(x) and x.is_contiguous()):
        return x * factor
    out = empty(x.shape, x.dtype)
    native.kernels.add_scaled(x=None, y=x, out=out, scale=factor)
    return out


@lru_cache
def _round_to_dtype(scale: float, dtype: torch.dtype) -> float:
    return torch.tensor(scale, dtype=dtype).item()


def add_scaled(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """x + y * scale, for two tensors of the same shape."""
    if native.supports(x, y) and x.is_contiguous() and y.is_contiguous():
        out = empty(x.shape, x.dtype)
        native.kernels.add_scaled(x=x, y=y, out=out, scale=scale)
        return out
    if gpu.supports(x, y):
        return torch.add(x, y, alpha=scale)  # a single kernel, which rounds once, as ours do
    return reference(x, y, scale)


def reference(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """`add_scaled` in torch."""
    return x + y if scale == 1.0 else x + y * scale
