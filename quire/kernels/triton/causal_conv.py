"""Causal convolution over time; the twin of `quire.kernels.causal_conv.reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.numerics import sigmoid
from quire.kernels.triton.variants import KernelVariant

_BLOCK = 128  # channels of a program


@triton.jit
def causal_conv_kernel(
    x,
    weight,
    bias,
    state,
    slots,
    bounds,
    gate,
    out,
    channels,
    x_stride,
    gate_stride,
    state_stride,
    tap_stride,
    channel_stride,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK channels of a sequence. The slot of padding is negative: nothing of it is read or kept."""
    sequence = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    begin, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    slot = tl.load(slots + sequence)
    kept, has_slot = state + slot * state_stride + at, inside & (slot >= 0)
    added = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        added = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    for token in range(begin, end):
        total = added
        for tap in tl.static_range(WIDTH):
            source = token - (WIDTH - 1) + tap
            is_new = source >= begin
            row = WIDTH - 1 + source - begin
            old = tl.load(kept + row * channels, mask=has_slot & (source < begin), other=0.0)
            new = tl.load(x + source * x_stride + at, mask=inside & is_new, other=0.0).to(tl.float32)
            factor = tl.load(weight + at * channel_stride + tap * tap_stride, mask=inside, other=0.0).to(tl.float32)
            total += tl.where(is_new, new, old) * factor
        if SILU:
            total = total * sigmoid(total)
        if GATE:
            total = total * tl.load(gate + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * channels + at, total.to(out.dtype.element_ty), mask=inside)
    for place in tl.static_range(WIDTH - 1):  # from the oldest one: a row is read before it is overwritten
        source = end - (WIDTH - 1) + place
        is_new = source >= begin
        row = WIDTH - 1 + source - begin
        old = tl.load(kept + row * channels, mask=has_slot & (source < begin), other=0.0)
        new = tl.load(x + source * x_stride + at, mask=inside & is_new, other=0.0).to(tl.float32)
        tl.store(kept + place * channels, tl.where(is_new, new, old), mask=has_slot)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    gate: Tensor | None,
    *,
    silu: bool,
) -> Tensor:
    """See `quire.kernels.causal_conv.causal_conv`; `gate`: of outputs."""
    tokens, channels = x.shape
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if tokens:
        causal_conv_kernel[(len(slots), triton.cdiv(channels, _BLOCK))](
            x,
            weight,
            x if bias is None else bias,
            state,
            slots,
            cu_seqlens.to(x.device),
            x if gate is None else gate,
            out,
            channels,
            x.stride(0),
            0 if gate is None else gate.stride(0),
            state.stride(0),
            weight.stride(1),
            weight.stride(0),
            WIDTH=weight.shape[1],
            BIAS=bias is not None,
            SILU=silu,
            GATE=gate is not None,
            BLOCK=_BLOCK,
        )
    return out


VARIANTS = [
    KernelVariant(
        causal_conv_kernel,
        {
            **dict.fromkeys(("x", "weight", "bias", "gate", "out"), "*bf16"),
            "state": "*fp32",
            **dict.fromkeys(("slots", "bounds"), "*i64"),
            **dict.fromkeys(
                ("channels", "x_stride", "gate_stride", "state_stride", "tap_stride", "channel_stride"), "i32"
            ),
        },
        {"WIDTH": width, "BIAS": not gated, "SILU": not gated, "GATE": gated, "BLOCK": _BLOCK},
    )
    for width, gated in ((4, False), (3, True))
]
