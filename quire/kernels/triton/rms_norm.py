"""Root mean square norm; the twin of `quire.kernels.rms_norm.reference` and of `quire.kernels.add_rms_norm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.variants import KernelVariant

_MAX_ELEMENTS_PER_WARP = 512


@triton.jit
def rms_norm_kernel(
    x, y, weight, total, out, x_stride, y_stride, size, scale, eps, offset, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row. With ADD, the norm is that of x + y * scale, which is stored to `total`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(y + row * y_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = (values + added * scale).to(total.dtype.element_ty)
        tl.store(total + row * size + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + row * size + columns, (values * factor * weights).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """x / rms(x) * (weight + offset) over the last dimension, computed in float32.

    Args:
        x: (..., size) float32, float16 or bfloat16, last stride 1.
        weight: (size,).

    Returns:
        as x, contiguous.
    """
    rows = x.reshape(-1, x.shape[-1])
    return _run(rows, None, weight, 1.0, eps, offset)[1].view(x.shape)


def add_rms_norm(
    x: Tensor, y: Tensor, scale: float, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """x + y * scale, rounded to x's dtype, and the `rms_norm` of it.

    Args:
        x: (rows, size) float32, float16 or bfloat16, last stride 1; like y.
        weight: (size,).
    """
    return _run(x, y, weight, scale, eps, offset)


def _run(x: Tensor, y: Tensor | None, weight: Tensor, scale: float, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """The sum, which is x if there is no y, and the norm."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if y is None else torch.empty_like(out)
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        rms_norm_kernel[(len(x),)](
            x,
            x if y is None else y,
            weight,
            total,
            out,
            x.stride(0),
            x.stride(0) if y is None else y.stride(0),
            x.shape[1],
            scale,
            eps,
            offset,
            ADD=y is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // _MAX_ELEMENTS_PER_WARP)),
        )
    return total, out


VARIANTS = [
    KernelVariant(
        rms_norm_kernel,
        {
            **dict.fromkeys(("x", "y", "weight", "total", "out"), f"*{dtype}"),
            **dict.fromkeys(("x_stride", "y_stride", "size"), "i32"),
            **dict.fromkeys(("scale", "eps", "offset"), "fp32"),
        },
        {"ADD": add, "BLOCK": 4096},
        num_warps=8,
    )
    for dtype, add in (("bf16", False), ("bf16", True), ("fp32", True))
]
