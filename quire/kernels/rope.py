"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import native


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] numbers of each head.

    Args:
        x: (tokens, heads, head_dim).
        cos: (tokens, pairs) float32, as is sin.
        interleaved: pairs are neighbours in x; the result has all first and then all second numbers of the pairs,
            which leaves the products of queries and keys the same.
    """
    if not interleaved and native.take(x) and x.stride(1) == x.shape[2]:
        return _native(x, cos.contiguous(), sin.contiguous())
    return reference(x, cos, sin, interleaved=interleaved)


def reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """In torch."""
    dim = 2 * cos.shape[-1]
    turned, rest = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    parts = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(parts if rest is None else [*parts, rest], -1)


def _native(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype)
    native.kernels.rope(
        native.CODES[x.dtype], x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
        tokens, heads, dim, x.stride(0), cos.shape[1],
    )  # fmt: skip
    return out
