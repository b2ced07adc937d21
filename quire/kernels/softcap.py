"""Logit softcapping (gemma 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import gpu, native


def softcap_in_place(x: Tensor, cap: float) -> None:
    """Change x (rows, dim), which is contiguous, to cap * tanh(x / cap)."""
    if gpu.supports(x):
        from quire.kernels.triton import softcap as kernel

        kernel.softcap_in_place(x, cap)
    elif native.supports(x):
        native.kernels.softcap(x=x, cap=cap)
    else:
        x.copy_(softcap(x, cap))


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) in torch."""
    return torch.tanh(x / cap) * cap
