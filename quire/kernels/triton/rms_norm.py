"""Root mean square norm; the twin of `quire.kernels.rms_norm.reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.variants import KernelVariant

_MAX_ELEMENTS_PER_WARP = 512


@triton.jit
def rms_norm_kernel(x, weight, out, x_stride, size, eps, offset, BLOCK: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + row * size + columns, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """x / rms(x) * (weight + offset) over the last dimension, computed in float32.

    Args:
        x: (..., size) float32, float16 or bfloat16, last stride 1.
        weight: (size,).

    Returns:
        as x, contiguous.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        block = triton.next_power_of_2(rows.shape[1])
        warps = min(16, max(1, block // _MAX_ELEMENTS_PER_WARP))
        rms_norm_kernel[(len(rows),)](
            rows, weight, out, rows.stride(0), rows.shape[1], eps, offset, BLOCK=block, num_warps=warps
        )
    return out.view(x.shape)


VARIANTS = [
    KernelVariant(
        rms_norm_kernel,
        {
            "x": f"*{dtype}",
            "weight": f"*{dtype}",
            "out": f"*{dtype}",
            "x_stride": "i32",
            "size": "i32",
            "eps": "fp32",
            "offset": "fp32",
        },
        {"BLOCK": 4096},
    )
    for dtype in ("bf16", "fp32")
]
