"""Quantization of activations while the model runs; the twin of `quire.kernels.quantize.reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import gpu
from quire.kernels.triton.variants import KernelVariant

_MAX_ELEMENTS_PER_WARP = 512
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has no fraction, and is rounded half to even


@triton.jit
def _nearest_float8(x):
    """x rounded to a value of float8_e4m3fn. The interpreter's own conversion loses the carry into the exponent."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 0.015625, (x + _ROUNDER / 512) - _ROUNDER / 512, normal)


@triton.jit
def quantize_kernel(
    x, out, scales, x_stride, size, group, LIMIT: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    """One program per row and group of `group` elements; BLOCK is at least that."""
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    columns = tl.program_id(1) * group + inner
    inside = (inner < group) & (columns < size)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(values), 0), tl.full((), LIMIT, tl.float32))  # as exact as on CPUs
    divisor = tl.where(scale == 0.0, 1.0, scale)
    quotients = tl.div_rn(values, tl.zeros_like(values) + divisor)
    if out.dtype.element_ty == tl.int8:
        quotients = (quotients + _ROUNDER) - _ROUNDER
    quotients = tl.minimum(tl.maximum(quotients, -LIMIT), LIMIT)
    if INTERPRETED and out.dtype.element_ty != tl.int8:
        quotients = _nearest_float8(quotients)
    tl.store(out + row * size + columns, quotients.to(out.dtype.element_ty), mask=inside)
    scale += tl.sum(values * 0.0, 0)  # NaN if there is a NaN or an infinity
    tl.store(scales + row * tl.num_programs(1) + tl.program_id(1), scale)


def quantize_rows(x: Tensor, dtype: torch.dtype, limit: float, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits, and their scales.

    Args:
        x: (rows, size) float32, float16 or bfloat16, last stride 1.
        dtype: int8 or float8_e4m3fn.
        limit: the largest magnitude of a result.
        group: neighbouring elements that share a scale; None: all of a row.

    Returns:
        (rows, size) of `dtype`, and (rows, ceil(size / group)) float32: value = result * scale. NaN is the scale of
        elements of which one is not finite.
    """
    rows, size = x.shape
    groups = 1 if group is None else -(-size // group)
    out = torch.empty((rows, size), dtype=dtype, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(group or size)
        warps = min(16, max(1, block // _MAX_ELEMENTS_PER_WARP))
        quantize_kernel[(rows, groups)](
            x, out, scales, x.stride(0), size, group or size,
            LIMIT=limit, BLOCK=block, INTERPRETED=gpu.is_interpreted(), num_warps=warps,
        )  # fmt: skip
    return out, scales


VARIANTS = [
    KernelVariant(
        quantize_kernel,
        {"x": "*bf16", "out": f"*{dtype}", "scales": "*fp32", "x_stride": "i32", "size": "i32", "group": "i32"},
        {"LIMIT": limit, "BLOCK": block, "INTERPRETED": False},
    )
    for dtype, limit, block in (("i8", 127.0, 4096), ("fp8e4nv", 448.0, 128))
]
