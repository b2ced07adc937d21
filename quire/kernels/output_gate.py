"""Gates of the heads of attention, which its projection of queries makes as well (Qwen3-Next)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty, split_heads


def without_gates(projected: Tensor, heads: int, dim: int) -> Tensor:
    """Queries, keys and values, contiguous, out of a projection in which a gate lies behind each query head.

    projected: (tokens, (2 * heads + 2 * kv_heads) * dim), last stride 1.
    """
    if native.supports(projected):
        out = empty((len(projected), projected.shape[1] - heads * dim), projected.dtype)
        native.kernels.without_gates(projected=projected, out=out, heads=heads, dim=dim)
        return out
    queries = projected[:, : 2 * heads * dim].unflatten(1, (heads, 2, dim))[:, :, 0]
    return torch.cat((queries.flatten(1), projected[:, 2 * heads * dim :]), 1)


def gates_of(projected: Tensor, heads: int, dim: int) -> Tensor:
    """(tokens, heads, dim) the gates in a projection, see `without_gates`: a view."""
    return split_heads(projected, heads, 2 * dim)[:, :, dim:]


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), in x's dtype; both are (tokens, heads, dim), and x is contiguous."""
    if native.supports(x, gate) and x.shape[2] % native.LANES == 0 and x.is_contiguous():
        out = empty(x.shape, x.dtype)
        native.kernels.sigmoid_gate(x=x, gate=gate, out=out)
        return out
    return (x.float() * gate.float().sigmoid()).to(x.dtype)
