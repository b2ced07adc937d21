"""Attention within sequences that lie one behind the other, without a cache and without padding."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.softcap import softcap


@dataclass(frozen=True, slots=True)
class EncoderAttentionParams:
    """What is applied to the products of queries and keys.

    Attributes:
        window: a query at i attends to positions j with abs(i - j) < window; None for all.
        softcap: scores become softcap * tanh(score / softcap); None for no cap.
        alibi: (heads,) float32; scores lose alibi * abs(i - j).
        causal: queries attend to no later positions.
        bias: (heads, longest, longest) is added to scores; its first rows and columns for shorter sequences.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi: Tensor | None = None
    causal: bool = False
    bias: Tensor | None = None


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, params: EncoderAttentionParams) -> Tensor:
    """Attention of each sequence to itself.

    Args:
        q: (tokens, heads, dim).
        k: (tokens, kv_heads, dim).
        v: (tokens, kv_heads, dim).
        cu_seqlens: (sequences + 1,) int64, the first token of each sequence, and the number of tokens.

    Returns:
        (tokens, heads, dim)
    """
    return reference(q, k, v, cu_seqlens, params)


def reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, params: EncoderAttentionParams) -> Tensor:
    """`varlen_attention` in torch."""
    bounds = cu_seqlens.tolist()
    out = [_attend(q[a:b], k[a:b], v[a:b], params) for a, b in itertools.pairwise(bounds)]
    return torch.cat(out)


def _attend(q: Tensor, k: Tensor, v: Tensor, params: EncoderAttentionParams) -> Tensor:
    group = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), *(x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    bias = _bias(q.shape[1], params)
    if params.softcap is None:
        mask = None if bias is None else bias.to(q.dtype)[None]
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=params.scale)[
            0
        ].transpose(0, 1)
    scores = softcap(torch.matmul(q, k.transpose(1, 2)).float() * params.scale, params.softcap)
    scores = scores if bias is None else scores + bias
    return torch.matmul(scores.softmax(-1).to(v.dtype), v).transpose(0, 1)


def _bias(length: int, params: EncoderAttentionParams) -> Tensor | None:
    """What is added to the scores of a sequence, (heads or 1, length, length) float32."""
    if params.window is None and params.alibi is None and not params.causal and params.bias is None:
        return None
    position = torch.arange(length)
    distance = (position[:, None] - position).abs()
    bias = torch.zeros(1, length, length)
    if params.window is not None:
        bias = bias.masked_fill(distance >= params.window, -torch.inf)
    if params.causal:
        bias = bias.masked_fill(position > position[:, None], -torch.inf)
    if params.alibi is not None:
        bias = bias - params.alibi[:, None, None] * distance
    return bias if params.bias is None else bias + params.bias[:, :length, :length]
