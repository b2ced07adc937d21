"""Logit softcapping (gemma 2)."""

from __future__ import annotations

import torch
from torch import Tensor


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)."""
    return torch.tanh(x / cap) * cap
