"""Quantization of rows to 8 bits, each row or group of its elements with a scale of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import gpu

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest magnitude


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits, and their scales: x = result * scale.

    Args:
        x: (rows, size) float32, float16 or bfloat16, last stride 1.
        dtype: int8 or float8_e4m3fn.
        group: neighbouring elements that share a scale; None: all of a row.

    Returns:
        (rows, size) of `dtype`, and (rows, ceil(size / group)) float32. A scale is NaN if one of its elements is not
        finite.
    """
    if gpu.supports(x):
        from quire.kernels.triton import quantize as kernel

        return kernel.quantize_rows(x, dtype, LIMITS[dtype], group)
    return reference(x, dtype, group)


def reference(x: Tensor, dtype: torch.dtype, group: int | None = None) -> tuple[Tensor, Tensor]:
    """`quantize_rows` in torch."""
    rows, size = x.shape
    group = group or size
    groups = F.pad(x.float(), (0, -size % group)).view(rows, -(-size // group), group)
    scales = groups.abs().amax(2) / LIMITS[dtype]
    quotients = groups / torch.where(scales == 0, 1.0, scales)[..., None]
    quotients = (quotients.round() if dtype == torch.int8 else quotients).clamp(-LIMITS[dtype], LIMITS[dtype])
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    return quotients.flatten(1)[:, :size].to(dtype).contiguous(), scales
