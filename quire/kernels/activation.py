"""Activations, plain and gated: then one projection holds both gate and up."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.activation_names import CANONICAL_ACTIVATIONS
from quire.kernels.capture import empty

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "linear": lambda x: x,
}
ACTIVATIONS = {name: _FUNCTIONS[canonical] for name, canonical in CANONICAL_ACTIVATIONS.items()}
_NATIVE = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")
_SEVERAL_OPERATORS = ("quick_gelu", "relu2")  # others are a single kernel of torch


def kernel_activation(act: str) -> str | None:
    """The kernels' name of an activation; None if they do not compute it."""
    name = CANONICAL_ACTIVATIONS.get(act)
    return name if name in _NATIVE else None


def activation(x: Tensor, act: str, *, in_place: bool = False) -> Tensor:
    """act(x) of all elements of x, of any shape.

    Args:
        in_place: whether the result may overwrite x.
    """
    name = kernel_activation(act)
    if name is not None and x.dim() > 0 and native.supports(x) and x.is_contiguous():
        out = x if in_place else empty(x.shape, x.dtype)
        native.kernels.activation(x=x, out=out, act=name)
        return out
    if act in _SEVERAL_OPERATORS and gpu.supports(x) and x.is_contiguous():
        from quire.kernels.triton import activation as kernel

        return kernel.activation(x, act, in_place=in_place)
    return ACTIVATIONS[act](x)


def act_and_mul(gate_up: Tensor, act: str) -> Tensor:
    """act(gate) * up, where the last dimension of gate_up (tokens, 2 * size) is gate and then up."""
    size = gate_up.shape[-1] // 2
    name = kernel_activation(act) if size % native.LANES == 0 else None
    if name is not None and native.supports(gate_up) and gate_up.is_contiguous():
        out = empty((*gate_up.shape[:-1], size), gate_up.dtype)
        native.kernels.act_and_mul(gate_up=gate_up, out=out, act=name)
        return out
    if gpu.supports(gate_up) and gate_up.stride(-1) == 1:
        from quire.kernels.triton import activation as kernel

        return kernel.act_and_mul(gate_up, CANONICAL_ACTIVATIONS[act])
    return reference(gate_up, act)


def reference(gate_up: Tensor, act: str) -> Tensor:
    """`act_and_mul` in torch."""
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[act](gate) * up


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(clamp(up) + 1) * gate * sigmoid(alpha * gate), with gate clamped from above (gpt-oss)."""
    size = gate_up.shape[-1] // 2
    if gate_up.dim() == 2 and size % native.LANES == 0 and native.supports(gate_up) and gate_up.is_contiguous():
        out = empty((len(gate_up), size), gate_up.dtype)
        native.kernels.clamped_swiglu(gate_up=gate_up, out=out, alpha=alpha, limit=limit)
        return out
    if gpu.supports(gate_up) and gate_up.stride(-1) == 1:
        from quire.kernels.triton import activation as kernel

        return kernel.clamped_swiglu(gate_up, alpha, limit)
    return clamped_swiglu_reference(gate_up, alpha, limit)


def clamped_swiglu_reference(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """`clamped_swiglu` in torch."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * alpha))
