"""Attention of packed sequences to themselves, without a cache: encoders."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty
from quire.kernels.softcap import softcap

_MAX_SCORES = 1 << 24  # elements of scores that the reference computes at a time, 64 MiB


@dataclass(frozen=True, slots=True)
class EncoderAttentionParams:
    """Parameters applied to the products of queries and keys.

    Attributes:
        scale: above 0.
        window: the largest distance of a key that a query attends to; None for all keys of its sequence.
        softcap: scaled scores become softcap * tanh(score / softcap); None for no cap.
        alibi_slopes: (heads,) float32; a score is lowered by slope * distance (Press et al. 2022).
        biases: (heads, 2 * reach + 1) float32, added to scores by distance: the element reach + clamp(key - query,
            -reach, reach).
        causal: whether queries only attend to keys up to their own position.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    biases: Tensor | None = None
    causal: bool = False


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, params: EncoderAttentionParams) -> Tensor:
    """Attention of each token to the tokens of the same sequence.

    A sequence's result does not depend on the others. Queries, keys and values may be parts of one projection.

    Args:
        q: (tokens, heads, dim).
        k: (tokens, kv_heads, dim), like v.
        cu_seqlens: (sequences + 1,) int64, where each sequence begins, and then the number of tokens. A captured call
            reads it again when it is replayed; it may end in empty sequences.

    Returns:
        (tokens, heads, dim)
    """
    dim = q.shape[2]
    if not (native.supports(q, k, v) and dim % 2 == 0 and dim <= native.MAX_DIM):
        if gpu.supports(q, k, v, cu_seqlens):
            return _by_triton(q, k, v, cu_seqlens, params)
        return reference(q, k, v, cu_seqlens, params)
    q, k, v = (_with_dense_heads(x) for x in (q, k, v))
    out = empty(q.shape, q.dtype)
    native.kernels.varlen_attention(
        q=q,
        k=k,
        v=v,
        cu_seqlens=cu_seqlens,
        out=out,
        alibi_slopes=params.alibi_slopes,
        biases=params.biases,
        scale=params.scale,
        window=-1 if params.window is None else params.window,
        softcap=params.softcap or 0.0,
        causal=int(params.causal),
    )
    return out


def _by_triton(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, params: EncoderAttentionParams) -> Tensor:
    from quire.kernels.triton import varlen_attention as kernel

    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    return kernel.varlen_attention(
        q,
        k,
        v,
        cu_seqlens,
        scale=params.scale,
        window=params.window,
        softcap=params.softcap,
        alibi_slopes=params.alibi_slopes,
        biases=None if params.biases is None else params.biases.contiguous(),
        causal=params.causal,
    )


def _with_dense_heads(x: Tensor) -> Tensor:
    """x, or a copy if the heads of a token are not contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, params: EncoderAttentionParams) -> Tensor:
    """`varlen_attention` in torch."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    options = (params.window, params.softcap, params.alibi_slopes, params.biases)
    plain = not params.causal and all(option is None for option in options)
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        if begin == end:
            continue
        queries, keys, values = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        if plain:
            attended = F.scaled_dot_product_attention(
                queries[None], keys[None], values[None], scale=params.scale, enable_gqa=q.shape[1] != k.shape[1]
            )[0]
        else:
            attended = _explicit_attention(queries, keys, values, params)
        out[begin:end] = attended.transpose(0, 1)
    return out


def _explicit_attention(q: Tensor, k: Tensor, v: Tensor, params: EncoderAttentionParams) -> Tensor:
    """Attention of one sequence (heads, tokens, dim) with explicit scores, so that all params can be applied."""
    heads, tokens, _ = q.shape
    k, v = (x.repeat_interleave(heads // len(x), 0) for x in (k, v))
    positions = torch.arange(tokens, device=q.device)
    rows = max(1, _MAX_SCORES // (heads * tokens))
    chunks = zip(q.split(rows, 1), positions.split(rows), strict=True)
    return torch.cat([_attend(chunk, k, v, positions - at[:, None], params) for chunk, at in chunks], 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, distance: Tensor, params: EncoderAttentionParams) -> Tensor:
    """Attention of some queries. distance: (queries, positions), of each key to each query."""
    scores = torch.matmul(q, k.transpose(1, 2)).float() * params.scale
    if params.softcap is not None:
        scores = softcap(scores, params.softcap)
    if params.alibi_slopes is not None:
        scores -= params.alibi_slopes[:, None, None] * distance.abs()
    if params.biases is not None:
        reach = params.biases.shape[1] // 2
        scores += params.biases[:, distance.clamp(-reach, reach) + reach]
    if params.window is not None:
        scores.masked_fill_(distance.abs() > params.window, -torch.inf)
    if params.causal:
        scores.masked_fill_(distance > 0, -torch.inf)
    return torch.matmul(scores.softmax(-1).to(v.dtype), v)
