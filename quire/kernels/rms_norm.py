"""Root mean square norm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, in_place: bool = False) -> Tensor:
    """x / rms(x) * (weight + offset) over the last dimension, computed in float32, in x's dtype.

    in_place: the result replaces x.
    """
    if native.supports(x, weight) and (x.dim() == 2 or (x.dim() == 3 and _are_parts(x))):
        out = x if in_place else empty(x.shape, x.dtype)
        native.kernels.rms_norm(x=x, weight=weight, out=out, eps=eps, offset=offset)
        return out
    if gpu.supports(x, weight) and x.stride(-1) == 1:
        from quire.kernels.triton import rms_norm as kernel

        normed = kernel.rms_norm(x, weight, eps, offset)
    else:
        normed = reference(x, weight, eps, offset)
    return x.copy_(normed) if in_place else normed


def _are_parts(x: Tensor) -> bool:
    """Whether the parts of each row lie together."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def reference(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`rms_norm` in torch."""
    normed = x.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if x.dtype == torch.float32:
        return normed * (weight + offset if offset else weight)
    return (normed * (weight.float() + offset)).to(x.dtype) if offset else weight * normed.to(x.dtype)
