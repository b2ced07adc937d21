"""Products of elements, with each other or with a number, and of rows with the sigmoid of a number each."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """x * y in x's dtype. x: (rows, dim); y: the same shape and dtype, or (dim,) float32: a factor of each column."""
    if native.supports(x) and _fits(x, y):
        out = empty(x.shape, x.dtype)
        native.kernels.multiply(x=x, y=y, out=out, scale=1.0)
        return out
    return (x * y).to(x.dtype)


def scale_in_place(x: Tensor, scale: float) -> None:
    """Multiply x (rows, dim), whose rows may have a stride, with a number."""
    if native.supports(x):
        native.kernels.multiply(x=x, y=None, out=x, scale=scale)
    else:
        x *= scale


def multiply_rows(x: Tensor, factors: Tensor) -> None:
    """Multiply each row of x (rows, dim) in place with a number, which is rounded to x's dtype.

    factors: (rows, 1) float32.
    """
    if native.supports(x) and factors.is_contiguous():
        native.kernels.multiply_rows(x=x, factors=factors)
    else:
        x *= factors.to(x.dtype)


def gate_rows(x: Tensor, logits: Tensor) -> Tensor:
    """x * sigmoid(logits), where the sigmoids are rounded to x's dtype. x: (rows, dim); logits: (rows, 1) float32."""
    if native.supports(x) and x.is_contiguous() and logits.is_contiguous():
        out = empty(x.shape, x.dtype)
        native.kernels.gate_rows(x=x, logits=logits, out=out)
        return out
    return x * sigmoid(logits).to(x.dtype)


def sigmoid(logits: Tensor) -> Tensor:
    """The sigmoids of float32 logits, whose bits do not depend on how many tokens there are.

    On CPUs torch's own has other last bits at the end of a tensor, behind its last whole vector.
    """
    if logits.device.type != "cpu":
        return logits.sigmoid()
    return torch.stack([logits, torch.zeros_like(logits)], -1).softmax(-1)[..., 0]


def _fits(x: Tensor, y: Tensor) -> bool:
    if y.dim() == 1:
        return y.dtype == torch.float32 and y.device.type == "cpu"
    return y.shape == x.shape and native.supports(x, y)
