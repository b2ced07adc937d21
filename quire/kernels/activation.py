"""Gated activations: one projection holds both gate and up."""

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
_NATIVE = {"silu": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


def act_and_mul(gate_up: Tensor, act: str) -> Tensor:
    """act(gate) * up, where the last dimension of gate_up (tokens, 2 * size) is gate and then up."""
    size = gate_up.shape[-1] // 2
    if act in _NATIVE and size % native.LANES == 0 and native.supports(gate_up) and gate_up.is_contiguous():
        out = empty((*gate_up.shape[:-1], size), gate_up.dtype)
        native.kernels.act_and_mul(gate_up=gate_up, out=out, act=_NATIVE[act])
        return out
    return reference(gate_up, act)


def reference(gate_up: Tensor, act: str) -> Tensor:
    """`act_and_mul` in torch."""
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[act](gate) * up


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(clamp(up) + 1) * gate * sigmoid(alpha * gate), with gate clamped from above (gpt-oss)."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * alpha))
