"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] numbers of each head.

    Args:
        x: (tokens, heads, head_dim).
        cos: (tokens, pairs) float32, as is sin.
        interleaved: pairs are neighbours in x; the result has all first and then all second numbers of the pairs,
            which leaves the products of queries and keys the same.
    """
    dim = 2 * cos.shape[-1]
    turned, rest = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    parts = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(parts if rest is None else [*parts, rest], -1)
