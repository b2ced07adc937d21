"""Attention with grouped keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import RMSNorm
from quire.engine.models.layers.step import StepContext
from quire.engine.models.spec import DecoderSpec, GroupedAttention, QKNorm
from quire.kernels.paged_attention import AttentionParams
from quire.kernels.qk_norm_rope import QKNormWeights, qk_norm_rope


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

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `Attend`."""
        spec = self.spec
        qkv = self.qkv(x)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            if spec.qk_norm is QKNorm.ALL:
                q, k, v = qkv.split(self.qkv.parts, -1)
                qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), -1)
            else:
                norms = QKNormWeights(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset)
        rope = None if spec.rope is None else step.ropes[spec.rope]
        q, k, v = qk_norm_rope(qkv, spec.heads, spec.kv_heads, norms, rope)
        params = AttentionParams(spec.scale, spec.window, spec.softcap, self.sinks)
        last_token_only = last_layer and step.last_token_only
        attended = step.attend(self.index, q, k, v, params, last_layer=last_layer, last_token_only=last_token_only)
        out: Tensor = self.out(attended.flatten(1))
        return out

    def _norm(self, size: int, decoder: DecoderSpec) -> RMSNorm | None:
        if self.spec.qk_norm is None:
            return None
        dim = self.spec.head_dim if self.spec.qk_norm is QKNorm.HEAD else size
        return RMSNorm(dim, decoder.eps, decoder.norm_offset)
