"""Sums of residual branches, and what is only scaled."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty


def scaled(x: Tensor, scale: float) -> Tensor:
    """x * scale, where the scale is rounded to x's type first, as transformers has it."""
    if scale == 1.0:
        return x
    factor = _rounded(scale, x.dtype)
    if not (native.supports(x) and x.is_contiguous()):
        return x * factor
    out = empty(x.shape, x.dtype)
    native.kernels.add_scaled(native.CODES[x.dtype], 0, x.data_ptr(), out.data_ptr(), *_size(x), factor)
    return out


@lru_cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    return torch.tensor(scale, dtype=dtype).item()


def add_scaled(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """x + y * scale, of two tensors of one shape."""
    if native.supports(x, y) and x.is_contiguous() and y.is_contiguous():
        out = empty(x.shape, x.dtype)
        code = native.CODES[x.dtype]
        native.kernels.add_scaled(code, x.data_ptr(), y.data_ptr(), out.data_ptr(), *_size(x), scale)
        return out
    return reference(x, y, scale)


def _size(x: Tensor) -> tuple[int, int]:
    """Rows, and the numbers of each."""
    return x.shape[0], math.prod(x.shape[1:])


def reference(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """In torch."""
    return x + y if scale == 1.0 else x + y * scale
