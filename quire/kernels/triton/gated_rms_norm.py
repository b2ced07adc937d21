"""Root mean square norm of groups with a gate; the twin of `quire.kernels.gated_rms_norm.reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.numerics import sigmoid
from quire.kernels.triton.variants import KernelVariant

_MAX_ELEMENTS_PER_WARP = 512


@triton.jit
def gated_rms_norm_kernel(
    x, gate, weight, out, size, x_stride, gate_stride, group, eps, GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for a group of a row."""
    row, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * group
    columns = tl.arange(0, BLOCK)
    inside = columns < group
    at = begin + columns
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    opened = opened * sigmoid(opened)
    if GATE_FIRST:
        values = values * opened
    values = values * tl.rsqrt(tl.sum(values * values, 0) / group + eps)
    values = values.to(out.dtype.element_ty).to(tl.float32)
    values = values * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        values = values * opened
    tl.store(out + row * size + at, values.to(out.dtype.element_ty), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, group: int, eps: float, *, gate_first: bool) -> Tensor:
    """See `quire.kernels.gated_rms_norm.gated_rms_norm`."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(group)
        gated_rms_norm_kernel[(rows, size // group)](
            x,
            gate,
            weight,
            out,
            size,
            x.stride(0),
            gate.stride(0),
            group,
            eps,
            GATE_FIRST=gate_first,
            BLOCK=block,
            num_warps=min(16, max(1, block // _MAX_ELEMENTS_PER_WARP)),
        )
    return out


VARIANTS = [
    KernelVariant(
        gated_rms_norm_kernel,
        {
            **dict.fromkeys(("x", "gate", "weight", "out"), "*bf16"),
            **dict.fromkeys(("size", "x_stride", "gate_stride", "group"), "i32"),
            "eps": "fp32",
        },
        {"GATE_FIRST": first, "BLOCK": 2048},
    )
    for first in (True, False)
]
