"""Linear recurrence of channels whose decays and inputs have gates (RG-LRU, De et al. 2024), token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty


def gated_linear_recurrence(
    x: Tensor,
    gates: Tensor,
    rate: Tensor,
    positions: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    block: int,
) -> Tensor:
    """h = decay * h + sqrt(1 - decay^2) * input_gate * x, where decay = e^(-rate * decay_gate); the result is h.

    At position 0 the factor of the square root is left out. Gates are sigmoids. Elements are multiplied and added in
    the order of tokens, so a result depends neither on how a sequence is divided among calls, nor on other sequences.

    Args:
        x: (tokens, channels), last stride 1.
        gates: (tokens, 2 * channels) float32, last stride 1: of each block of channels what the sigmoids of its gates
            of inputs are taken of, then of its gates of decays.
        rate: (channels,) float32.
        positions: (tokens,) int64, those in the sequences.
        state: (slots, channels) float32, changed in place.
        slots: (sequences,) int64, the state of each sequence; no two are equal. On GPUs -1 is padding without a state.
        cu_seqlens: (sequences + 1,) int64 on the host, where the tokens of each sequence begin, and where the last end.
        block: channels of a block.

    Returns:
        (tokens, channels) in x's dtype, contiguous.
    """
    if not (native.supports(x) and native.supports(gates) and block % native.LANES == 0):
        return reference(x, gates, rate, positions, state, slots, cu_seqlens, block)
    out = empty(x.shape, x.dtype)
    native.kernels.gated_linear_recurrence(
        x=x,
        gates=gates,
        rate=rate,
        positions=positions,
        state=state,
        slots=slots,
        cu_seqlens=cu_seqlens,
        out=out,
        block=block,
    )
    return out


def reference(
    x: Tensor,
    gates: Tensor,
    rate: Tensor,
    positions: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    block: int,
) -> Tensor:
    """`gated_linear_recurrence` in torch."""
    # Sigmoids of torch's own have other last bits at the end of a tensor on CPUs.
    input_gate, decay_gate = (
        (1 / (1 + (-gates).exp())).unflatten(1, (-1, 2, block)).transpose(1, 2).flatten(2).unbind(1)
    )
    log_decay = decay_gate * -rate
    unwritten = (1 - (2 * log_decay).exp()).sqrt()
    written = x.float() * input_gate * unwritten.masked_fill(positions[:, None] == 0, 1.0)
    return _recurrence(written, log_decay.exp(), state, slots, cu_seqlens).to(x.dtype)


def _recurrence(x: Tensor, decay: Tensor, state: Tensor, slots: Tensor, cu_seqlens: Tensor) -> Tensor:
    bounds = cu_seqlens.tolist()
    if len(x) == len(slots) == bounds[-1]:  # each has one token
        h = decay * state[slots] + x
        _store(h, state, slots)
        return h
    out = torch.zeros_like(x)
    for slot, begin, end in zip(slots.tolist(), bounds, bounds[1:], strict=False):
        if slot < 0:
            continue
        h = state[slot]
        for token in range(begin, end):
            torch.add(decay[token] * h, x[token], out=h)
            out[token] = h
    return out


def _store(h: Tensor, state: Tensor, slots: Tensor) -> None:
    """Store the rows of h that have a slot, which come first, without reading on the host which these are.

    The others store what the first one does, so that all that is stored in its slot is equal.
    """
    has_slot, first = (slots >= 0)[:, None], slots[:1].clamp(min=0)
    unchanged = torch.where(has_slot[:1], h[:1], state[first])
    state[torch.where(slots >= 0, slots, first)] = torch.where(has_slot, h, unchanged)
