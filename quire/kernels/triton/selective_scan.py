"""State-space recurrence with decays of each channel; the twin of `quire.kernels.selective_scan.reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.state_parameters import ChannelParameters
from quire.kernels.triton.numerics import sigmoid, softplus
from quire.kernels.triton.variants import KernelVariant

_BLOCK = 64  # channels of a program


@triton.jit
def selective_scan_kernel(
    x,
    dt,
    b,
    c,
    rate,
    bias,
    skip,
    state,
    slots,
    bounds,
    gate,
    out,
    channels,
    size,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    gate_stride,
    state_stride,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program for BLOCK channels of a sequence. A negative slot is that of padding: its state is not kept."""
    sequence = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, SIZE)
    inside, known = at < channels, rows < size
    within = known[:, None] & inside[None, :]
    places = rows[:, None] * channels + at[None, :]
    begin, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    slot = tl.load(slots + sequence)
    state_at = state + slot * state_stride + places
    has_slot = within & (slot >= 0)
    total = tl.load(state_at, mask=has_slot, other=0.0)
    rates = -tl.abs(tl.load(rate + places, mask=within, other=0.0))
    added_bias = tl.load(bias + at, mask=inside, other=0.0)
    factor = tl.load(skip + at, mask=inside, other=0.0)
    for token in range(begin, end):
        step = softplus(tl.load(dt + token * dt_stride + at, mask=inside, other=0.0).to(tl.float32) + added_bias)
        value = tl.load(x + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
        write = tl.load(b + token * b_stride + rows, mask=known, other=0.0).to(tl.float32)
        read = tl.load(c + token * c_stride + rows, mask=known, other=0.0).to(tl.float32)
        total = total * tl.exp(rates * step[None, :]) + write[:, None] * (step * value)[None, :]
        result = tl.sum(total * read[:, None], 0) + value * factor
        if GATE:
            opened = tl.load(gate + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
            result = result * opened * sigmoid(opened)
        tl.store(out + token * channels + at, result.to(out.dtype.element_ty), mask=inside)
    tl.store(state_at, total, mask=has_slot)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    parameters: ChannelParameters,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    gate: Tensor | None,
) -> Tensor:
    """See `quire.kernels.selective_scan.selective_scan`."""
    tokens, channels = x.shape
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if tokens:
        selective_scan_kernel[(len(slots), triton.cdiv(channels, _BLOCK))](
            x,
            dt,
            b,
            c,
            parameters.rate,
            parameters.bias,
            parameters.skip,
            state,
            slots,
            cu_seqlens.to(x.device),
            x if gate is None else gate,
            out,
            channels,
            b.shape[1],
            x.stride(0),
            dt.stride(0),
            b.stride(0),
            c.stride(0),
            0 if gate is None else gate.stride(0),
            state.stride(0),
            GATE=gate is not None,
            BLOCK=_BLOCK,
            SIZE=triton.next_power_of_2(b.shape[1]),
        )
    return out


VARIANTS = [
    KernelVariant(
        selective_scan_kernel,
        {
            **dict.fromkeys(("x", "dt", "b", "c", "gate", "out"), "*bf16"),
            **dict.fromkeys(("rate", "bias", "skip", "state"), "*fp32"),
            **dict.fromkeys(("slots", "bounds"), "*i64"),
            **dict.fromkeys(("channels", "size"), "i32"),
            **dict.fromkeys(("x_stride", "dt_stride", "b_stride", "c_stride", "gate_stride", "state_stride"), "i32"),
        },
        {"GATE": gated, "BLOCK": _BLOCK, "SIZE": 16},
    )
    for gated in (True, False)
]
