"""Logit softcapping (gemma 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import gpu


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)."""
    if gpu.supports(x):
        from quire.kernels.triton import softcap as kernel

        return kernel.softcap(x, cap)
    return reference(x, cap)


def reference(x: Tensor, cap: float) -> Tensor:
    """`softcap` in torch."""
    return torch.tanh(x / cap) * cap
