"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import gpu, native


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] elements of each head.

    Args:
        x: (tokens, heads, head_dim); compiled kernels overwrite it.
        cos: (tokens, pairs) float32, like sin.
        interleaved: elements 2i and 2i + 1 of x are a pair, instead of i and i + pairs. The result is not interleaved,
            which does not change products of queries and keys.
    """
    if _runs_natively(x):
        native.kernels.qk_norm_rope(
            x=x,
            cos=cos.contiguous(),
            sin=sin.contiguous(),
            q_weight=None,
            k_weight=None,
            q_heads=x.shape[1],
            k_heads=0,
            eps=0.0,
            offset=0.0,
            interleaved=int(interleaved),
        )
        return x
    if gpu.supports(x, cos, sin):
        from quire.kernels.triton import rope as kernel

        return kernel.apply_rope(x, cos, sin, interleaved=interleaved)
    return reference(x, cos, sin, interleaved=interleaved)


def _runs_natively(x: Tensor) -> bool:
    return native.LANES <= x.shape[2] <= native.MAX_DIM and native.supports(x)


def reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """`apply_rope` in torch."""
    dim = 2 * cos.shape[-1]
    rotated, unchanged = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    first, second = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    parts = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(parts if unchanged is None else [*parts, unchanged], -1)
