"""Recurrence of state-space models whose heads have one decay per token (Mamba-2, Dao and Gu 2024)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty
from quire.kernels.state_parameters import HeadParameters

_MAX_STATE = 1024  # elements of the compiled kernels' groups


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    heads: HeadParameters,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    *,
    gate: Tensor | None = None,
) -> Tensor:
    """S = e^(-|rate| * step) * S + step * b x^T for each token; its result is c S + skip * x.

    A result depends neither on how a sequence is divided among calls, nor on other sequences.

    Args:
        x: (tokens, heads, dim), the last two dimensions dense.
        dt: (tokens, heads), last stride 1; a step is its softplus.
        b: (tokens, groups, size), what a group of heads writes with; the last two dimensions dense.
        c: (tokens, groups, size), what it reads with.
        heads: the heads' parameters.
        state: (slots, heads, size, dim) float32, changed in place.
        slots: (sequences,) int64, the state of each sequence; no two are equal. On GPUs -1 is padding without a state.
        cu_seqlens: (sequences + 1,) int64 on the host, where the tokens of each sequence begin, and where the last end.
        gate: (tokens, heads, dim), whose silu results are multiplied with.

    Returns:
        (tokens, heads, dim) in x's dtype, contiguous.
    """
    tensors = (x, dt, b, c) if gate is None else (x, dt, b, c, gate)
    if native.supports(*tensors) and x.shape[2] % native.LANES == 0 and b.shape[2] <= _MAX_STATE:
        out = empty(x.shape, x.dtype)
        native.kernels.state_space_scan(
            x=x,
            dt=dt,
            b=b,
            c=c,
            rate=heads.rate,
            bias=heads.bias,
            skip=heads.skip,
            state=state,
            slots=slots,
            cu_seqlens=cu_seqlens,
            out=out,
            gate=gate,
            low=heads.low,
            high=heads.high,
        )
        return out
    if gpu.supports(*tensors, state):
        from quire.kernels.triton import state_space_scan as kernel

        return kernel.state_space_scan(x, dt, b, c, heads, state, slots, cu_seqlens, gate)
    return reference(x, dt, b, c, heads, state, slots, cu_seqlens, gate)


def reference(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    heads: HeadParameters,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    gate: Tensor | None,
) -> Tensor:
    """`state_space_scan` in torch."""
    out, count = torch.zeros(x.shape, dtype=torch.float32, device=x.device), x.shape[1] // b.shape[1]
    bounds = cu_seqlens.tolist()
    for slot, begin, end in zip(slots.tolist(), bounds, bounds[1:], strict=False):
        if slot < 0:
            continue
        for token in range(begin, end):
            steps = F.softplus(dt[token].float() + heads.bias).clamp(heads.low, heads.high)
            added = x[token].float() * steps[:, None]
            write, read = (part[token].float().repeat_interleave(count, 0) for part in (b, c))
            state[slot] *= (-steps * heads.rate.abs()).exp()[:, None, None]
            state[slot] += write[:, :, None] * added[:, None]
            out[token] = (state[slot] * read[:, :, None]).sum(1) + x[token].float() * heads.skip[:, None]
    if gate is not None:
        out *= F.silu(gate.float())
    return out.to(x.dtype)
