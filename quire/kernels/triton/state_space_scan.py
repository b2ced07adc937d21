"""Recurrence of state-space models with one decay per head; the twin of `quire.kernels.state_space_scan.reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.state_parameters import HeadParameters
from quire.kernels.triton.numerics import sigmoid, softplus
from quire.kernels.triton.variants import KernelVariant

_BLOCK = 16  # elements of a head in a program


@triton.jit
def state_space_scan_kernel(
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
    heads,
    dim,
    heads_per_group,
    size,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    gate_stride,
    state_stride,
    low,
    high,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program for BLOCK elements of a head of a sequence. The slot of padding is negative."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, SIZE)
    inside, known = at < dim, rows < size
    begin, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    slot = tl.load(slots + sequence)
    state_at = state + slot * state_stride + (head * size + rows[:, None]) * dim + at[None, :]
    within = known[:, None] & inside[None, :] & (slot >= 0)
    total = tl.load(state_at, mask=within, other=0.0)
    decay_rate, added_bias, factor = -tl.abs(tl.load(rate + head)), tl.load(bias + head), tl.load(skip + head)
    column = head * dim + at
    group = head // heads_per_group * size + rows
    for token in range(begin, end):
        step = softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + added_bias)
        step = tl.minimum(tl.maximum(step, low), high)
        value = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        write = tl.load(b + token * b_stride + group, mask=known, other=0.0).to(tl.float32)
        read = tl.load(c + token * c_stride + group, mask=known, other=0.0).to(tl.float32)
        total = total * tl.exp(step * decay_rate) + write[:, None] * (step * value)[None, :]
        result = tl.sum(total * read[:, None], 0) + value * factor
        if GATE:
            opened = tl.load(gate + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
            result = result * opened * sigmoid(opened)
        tl.store(out + token * heads * dim + column, result.to(out.dtype.element_ty), mask=inside)
    tl.store(state_at, total, mask=within)


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    parameters: HeadParameters,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    gate: Tensor | None,
) -> Tensor:
    """See `quire.kernels.state_space_scan.state_space_scan`."""
    tokens, heads, dim = x.shape
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if tokens:
        state_space_scan_kernel[(len(slots), heads, triton.cdiv(dim, _BLOCK))](
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
            heads,
            dim,
            heads // b.shape[1],
            b.shape[2],
            x.stride(0),
            dt.stride(0),
            b.stride(0),
            c.stride(0),
            0 if gate is None else gate.stride(0),
            state.stride(0),
            parameters.low,
            parameters.high,
            GATE=gate is not None,
            BLOCK=_BLOCK,
            SIZE=triton.next_power_of_2(b.shape[2]),
        )
    return out


VARIANTS = [
    KernelVariant(
        state_space_scan_kernel,
        {
            **dict.fromkeys(("x", "dt", "b", "c", "gate", "out"), "*bf16"),
            **dict.fromkeys(("rate", "bias", "skip", "state"), "*fp32"),
            **dict.fromkeys(("slots", "bounds"), "*i64"),
            **dict.fromkeys(("heads", "dim", "heads_per_group", "size"), "i32"),
            **dict.fromkeys(("x_stride", "dt_stride", "b_stride", "c_stride", "gate_stride", "state_stride"), "i32"),
            **dict.fromkeys(("low", "high"), "fp32"),
        },
        {"GATE": gated, "BLOCK": _BLOCK, "SIZE": 128},
    )
    for gated in (False, True)
]
