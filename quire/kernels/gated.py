"""Gated activations: the halves of one projection are gate and value."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def act_and_mul(gate_up: Tensor, act: str) -> Tensor:
    """act(gate) * up, where the last dimension holds gate and then up."""
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[act](gate) * up


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(clamp(up) + 1) * gate * sigmoid(alpha * gate) with gate clamped from above (gpt-oss)."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * alpha))
