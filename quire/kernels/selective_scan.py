"""Recurrence of state-space models whose channels have decays of their own (Mamba, Gu and Dao 2023)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty
from quire.kernels.state_parameters import ChannelParameters

_MAX_STATE = 256  # elements of a channel in the compiled kernels


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    channels: ChannelParameters,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    *,
    gate: Tensor | None = None,
) -> Tensor:
    """s = e^(-|rate| * step) * s + step * b * x for each token and channel; its result is c s + skip * x.

    A result depends neither on how a sequence is divided among calls, nor on other sequences.

    Args:
        x: (tokens, channels), last stride 1.
        dt: (tokens, channels), last stride 1; a step is its softplus.
        b: (tokens, size), what all channels write with; last stride 1.
        c: (tokens, size), what they read with.
        channels: the channels' parameters.
        state: (slots, size, channels) float32, changed in place.
        slots: (sequences,) int64, the state of each sequence; no two are equal. On GPUs -1 is padding without a state.
        cu_seqlens: (sequences + 1,) int64 on the host, where the tokens of each sequence begin, and where the last end.
        gate: (tokens, channels), whose silu results are multiplied with.

    Returns:
        (tokens, channels) in x's dtype, contiguous.
    """
    tensors = (x, dt, b, c) if gate is None else (x, dt, b, c, gate)
    if native.supports(*tensors) and x.shape[1] % native.LANES == 0 and b.shape[1] <= _MAX_STATE:
        out = empty(x.shape, x.dtype)
        native.kernels.selective_scan(
            x=x,
            dt=dt,
            b=b,
            c=c,
            rate=channels.rate,
            bias=channels.bias,
            skip=channels.skip,
            state=state,
            slots=slots,
            cu_seqlens=cu_seqlens,
            out=out,
            gate=gate,
        )
        return out
    if gpu.supports(*tensors, state):
        from quire.kernels.triton import selective_scan as kernel

        return kernel.selective_scan(x, dt, b, c, channels, state, slots, cu_seqlens, gate)
    return reference(x, dt, b, c, channels, state, slots, cu_seqlens, gate)


def reference(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    channels: ChannelParameters,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    gate: Tensor | None,
) -> Tensor:
    """`selective_scan` in torch."""
    out, bounds = torch.zeros(x.shape, dtype=torch.float32, device=x.device), cu_seqlens.tolist()
    for slot, begin, end in zip(slots.tolist(), bounds, bounds[1:], strict=False):
        if slot < 0:
            continue
        for token in range(begin, end):
            value = x[token].float()
            steps = F.softplus(dt[token].float() + channels.bias)
            state[slot] *= (-steps * channels.rate.abs()).exp()
            state[slot] += b[token].float()[:, None] * (steps * value)
            out[token] = (state[slot] * c[token].float()[:, None]).sum(0) + value * channels.skip
    if gate is not None:
        out *= F.silu(gate.float())
    return out.to(x.dtype)
