"""A residual branch is added, and the sum is normed: one kernel on GPUs, whose steps are bound by memory."""

from __future__ import annotations

from torch import Tensor

from quire.kernels import gpu
from quire.kernels.add_scaled import add_scaled
from quire.kernels.rms_norm import rms_norm


def add_rms_norm(
    x: Tensor, y: Tensor, scale: float, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """x + y * scale, rounded to x's dtype, and its `rms_norm`.

    Args:
        x: (rows, size), like y.
        weight: (size,).
    """
    if gpu.supports(x, y, weight):
        from quire.kernels.triton import rms_norm as kernel

        return kernel.add_rms_norm(x, y, scale, weight, eps, offset)
    total = add_scaled(x, y, scale)
    return total, rms_norm(total, weight, eps, offset)
