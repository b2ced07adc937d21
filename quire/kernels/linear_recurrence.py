"""Linear recurrence of channels, token by token."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_recurrence(x: Tensor, decay: Tensor, state: Tensor, slots: Tensor, cu_seqlens: Tensor) -> Tensor:
    """h = decay * h + x for each token; its result is h.

    Elements are multiplied and added in the order of tokens, so a result depends neither on how a sequence is divided
    among calls, nor on other sequences.

    Args:
        x: (tokens, channels) float32, like decay.
        state: (slots, channels) float32, changed in place.
        slots: (sequences,) int64, the state of each sequence; no two are equal. On GPUs -1 is padding without a state.
        cu_seqlens: (sequences + 1,) int64 on the host, where the tokens of each sequence begin, and where the last end.

    Returns:
        (tokens, channels) float32.
    """
    bounds = cu_seqlens.tolist()
    if len(x) == len(slots) == bounds[-1]:  # each has one token
        h = decay * state[slots] + x
        kept = slots >= 0
        state[slots[kept]] = h[kept]
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


def sigmoid(x: Tensor) -> Tensor:
    """Sigmoids, whose bits do not depend on how many there are: on CPUs, those of torch's own do."""
    return 1 / (1 + (-x).exp())
