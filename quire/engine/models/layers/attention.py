"""Attention with grouped keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import RMSNorm
from quire.engine.models.layers.step import StepContext
from quire.engine.models.spec import DecoderSpec, GroupedAttention, QKNorm
from quire.kernels.paged_attention import ScoreMath
from quire.kernels.rope import apply_rope


class GroupedAttentionLayer(nn.Module):
    """Projections, optional norms, rope, paged attention, output projection."""

    def __init__(self, index: int, spec: GroupedAttention, decoder: DecoderSpec) -> None:
        super().__init__()
        self.index = index
        self.spec = spec
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.qkv = Linear(decoder.hidden, queries, keys, keys, bias=spec.qkv_bias)
        self.out = Linear(queries, decoder.hidden, bias=spec.out_bias)
        self.q_norm, self.k_norm = (self._norm(size, decoder) for size in (queries, keys))
        self.sinks = nn.Parameter(torch.empty(spec.heads), requires_grad=False) if spec.sinks else None

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """(tokens, hidden) to (tokens, hidden)."""
        spec = self.spec
        q, k, v = self.qkv(x).split(self.qkv.parts, -1)
        q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        v = v.unflatten(-1, (spec.kv_heads, spec.head_dim))
        if spec.rope is not None:
            cos, sin = step.ropes[spec.rope]
            q, k = (apply_rope(part, cos, sin, interleaved=spec.rope.interleaved) for part in (q, k))
        math = ScoreMath(spec.scale, spec.window, spec.softcap, self.sinks)
        out: Tensor = self.out(step.attend(self.index, q, k, v, math).flatten(1))
        return out

    def _norm(self, size: int, decoder: DecoderSpec) -> RMSNorm | None:
        if self.spec.qk_norm is None:
            return None
        dim = self.spec.head_dim if self.spec.qk_norm is QKNorm.HEAD else size
        return RMSNorm(dim, decoder.eps, decoder.norm_offset)

    def _normed(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """Split into heads, with the norm before or behind the split."""
        if norm is not None and self.spec.qk_norm is QKNorm.ALL:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.spec.head_dim))
        return norm(x) if norm is not None and self.spec.qk_norm is QKNorm.HEAD else x
