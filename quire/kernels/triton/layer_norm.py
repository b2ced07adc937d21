"""Layer norm; the twin of `quire.kernels.layer_norm.reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.variants import KernelVariant

_MAX_ELEMENTS_PER_WARP = 512


@triton.jit
def layer_norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    x_stride,
    residual_stride,
    size,
    eps,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        values += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    centered = tl.where(inside, values - tl.sum(values, 0) / size, 0.0)
    variance = tl.sum(centered * centered, 0) / size
    result = centered * tl.rsqrt(variance + eps)
    result *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, result.to(out.dtype.element_ty), mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None) -> Tensor:
    """(v - mean) / sqrt(variance + eps) * weight + bias over the last dimension of v = x + residual, in float32.

    Args:
        x: (..., size) float32, float16 or bfloat16, last stride 1; like residual.
        weight: (size,), like bias.

    Returns:
        as x, contiguous.
    """
    rows = x.reshape(-1, x.shape[-1])
    added = rows if residual is None else residual.reshape(rows.shape)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if rows.numel():
        block = triton.next_power_of_2(rows.shape[1])
        layer_norm_kernel[(len(rows),)](
            rows,
            added,
            weight,
            weight if bias is None else bias,
            out,
            rows.stride(0),
            added.stride(0),
            rows.shape[1],
            eps,
            RESIDUAL=residual is not None,
            BIAS=bias is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // _MAX_ELEMENTS_PER_WARP)),
        )
    return out.view(x.shape)


VARIANTS = [
    KernelVariant(
        layer_norm_kernel,
        {
            **dict.fromkeys(("x", "residual", "weight", "bias", "out"), "*bf16"),
            **dict.fromkeys(("x_stride", "residual_stride", "size"), "i32"),
            "eps": "fp32",
        },
        {"RESIDUAL": present, "BIAS": present, "BLOCK": 1024},
    )
    for present in (False, True)
]
