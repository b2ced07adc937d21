"""Activations; the twins of the ops of `quire.kernels.activation`, computed in float32 and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.numerics import activate, sigmoid
from quire.kernels.triton.variants import KernelVariant

_BLOCK = 1024  # elements of a program


@triton.jit
def activation_kernel(x, out, count, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """All elements of contiguous tensors."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, activate(values, ACT).to(out.dtype.element_ty), mask=at < count)


@triton.jit
def gated_kernel(gate_up, out, stride, size, alpha, limit, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """One program for a block of a row; ACT may also be "clamped_swiglu", which alone reads alpha and limit."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + columns, mask=inside, other=0.0).to(tl.float32)
    if ACT == "clamped_swiglu":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        product = (up + 1.0) * (gate * sigmoid(gate * alpha))
    else:
        product = activate(gate, ACT) * up
    tl.store(out + row * size + columns, product.to(out.dtype.element_ty), mask=inside)


def activation(x: Tensor, act: str, *, in_place: bool = False) -> Tensor:
    """act(x) of all elements.

    Args:
        x: float32, float16 or bfloat16, of any shape, contiguous.
        act: an activation of `numerics.activate`.
        in_place: whether the result overwrites x.
    """
    out = x if in_place else torch.empty_like(x)
    if x.numel():
        activation_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), ACT=act, BLOCK=_BLOCK)
    return out


def act_and_mul(gate_up: Tensor, act: str) -> Tensor:
    """act(gate) * up: (..., 2 * size), gate and then up, to (..., size).

    Args:
        gate_up: float32, float16 or bfloat16, last stride 1.
        act: an activation of `numerics.activate`.
    """
    return _gated(gate_up, act, 0.0, 0.0)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(clamp(up) + 1) * gate * sigmoid(alpha * gate), as `act_and_mul`; gate is clamped from above only."""
    return _gated(gate_up, "clamped_swiglu", alpha, limit)


def _gated(gate_up: Tensor, act: str, alpha: float, limit: float) -> Tensor:
    size = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * size)
    out = torch.empty((len(rows), size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (len(rows), triton.cdiv(size, _BLOCK))
        gated_kernel[grid](rows, out, rows.stride(0), size, alpha, limit, ACT=act, BLOCK=_BLOCK)
    return out.view(*gate_up.shape[:-1], size)


_ALL = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "relu6", "leaky_relu", "mish", "hardswish", "tanh")
VARIANTS = [
    KernelVariant(
        activation_kernel,
        {"x": "*bf16", "out": "*bf16", "count": "i64"},
        {"ACT": "quick_gelu", "BLOCK": _BLOCK},
    ),
    *(
        KernelVariant(
            gated_kernel,
            {
                "gate_up": "*bf16",
                "out": "*bf16",
                "stride": "i32",
                "size": "i32",
                "alpha": "fp32",
                "limit": "fp32",
            },
            {"ACT": act, "BLOCK": _BLOCK},
        )
        for act in (*_ALL, "clamped_swiglu")
    ),
]
