"""Gated activations: the halves of one projection are gate and value."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
_NATIVE = {"silu": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "relu": 2}


def act_and_mul(gate_up: Tensor, act: str) -> Tensor:
    """act(gate) * up, where the last dimension of (tokens, 2 * size) holds gate and then up."""
    size = gate_up.shape[-1] // 2
    if act in _NATIVE and size % native.LANES == 0 and native.supports(gate_up) and gate_up.is_contiguous():
        return _native(gate_up, size, act)
    return reference(gate_up, act)


def reference(gate_up: Tensor, act: str) -> Tensor:
    """In torch."""
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[act](gate) * up


def _native(gate_up: Tensor, size: int, act: str) -> Tensor:
    out = empty((*gate_up.shape[:-1], size), gate_up.dtype)
    native.kernels.act_and_mul(
        native.CODES[out.dtype], gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size, _NATIVE[act]
    )
    return out


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(clamp(up) + 1) * gate * sigmoid(alpha * gate) with gate clamped from above (gpt-oss)."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * alpha))
