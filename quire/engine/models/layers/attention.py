"""Attention with grouped keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.inputs import KeysAndValues
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import LayerNorm, RMSNorm, make_norm
from quire.engine.models.layers.parallel import normalize_over_ranks, row_parallel
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.decoder import GroupedQueryAttention, QKNorm, StackSpec
from quire.kernels import native
from quire.kernels.capture import split_heads
from quire.kernels.copy_rows import dense_heads
from quire.kernels.head_norm import norm_heads_in_place
from quire.kernels.multiply import multiply_rows
from quire.kernels.output_gate import gates_of, sigmoid_gate, without_gates
from quire.kernels.paged_attention import AttentionParams
from quire.kernels.projected_heads import CosSin, ProjectedHeads, QKNormWeights
from quire.kernels.qk_norm_rope import qk_norm_rope
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rope import apply_rope
from quire.kernels.take_rows import take_rows


class GroupedAttentionLayer(nn.Module):
    """Projections, optional norms, rope, paged attention, output projection.

    Attributes:
        key_scale: scale of keys in a KV cache of float8, like value_scale; 1 if the checkpoint has none.
        head_scales: (2, kv_heads) float32: the same for keys and values of each head, beside those of all; None: 1.
        keeps_keys: layers of later pipeline stages read the keys and values: they are kept during a step.
    """

    derived_from_weights = ("_float_sinks",)  # made when first needed

    def __init__(
        self, index: int, spec: GroupedQueryAttention, model: StackSpec, group: RankGroup | None = None
    ) -> None:
        """`group`: ranks that have other heads."""
        super().__init__()
        self.index = index
        self.spec = spec
        self._group = group
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.qkv = Linear(model.hidden, queries * (2 if spec.output_gate else 1), keys, keys, bias=spec.qkv_bias)
        self.out = row_parallel(queries, model.hidden, group, bias=spec.out_bias)
        self.q_norm, self.k_norm = (self._norm(size, model) for size in (queries, keys))
        self._eps = model.norm.eps
        self._ones: Tensor | None = None  # weights of norms that have none, made when first needed
        self.sinks = nn.Parameter(torch.empty(spec.heads), requires_grad=False) if spec.sinks else None
        self._float_sinks: Tensor | None = None
        self.key_scale = self.value_scale = 1.0
        self.head_scales: Tensor | None = None
        self.keeps_keys = False
        self.alibi = None if spec.alibi is None else torch.tensor(spec.alibi, dtype=torch.float32, device="cpu")

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        spec = self.spec
        projected = qkv = self.qkv(x, lora=step.lora_rows(last_layer=False))
        if spec.output_gate:
            qkv = without_gates(projected, spec.heads, spec.head_dim)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            if spec.qk_norm is QKNorm.ALL:
                qkv = self._norm_all(qkv)
            elif isinstance(self.q_norm, LayerNorm) or isinstance(self.k_norm, LayerNorm):
                qkv = self._norm_heads(qkv)
            else:
                norms = QKNormWeights(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset)
        elif spec.qk_norm is QKNorm.HEAD_ONLY:
            ones = self._unit_weights(qkv)
            norms = QKNormWeights(ones, ones, self._eps, 0.0)
        if spec.value_norm:
            self._norm_values(qkv)
        if spec.temperature is not None:  # before the rope, which rotates: the results are the same
            multiply_rows(qkv[:, : self.qkv.parts[0]], step.query_factors[spec.temperature])
        rope = None if spec.rope is None else step.ropes[spec.rope]
        if spec.norms_rotated and norms is not None and rope is not None:
            qkv, rope = self._rotated(qkv, rope), None
        if self.alibi is not None and self.alibi.device != qkv.device:
            self.alibi = self.alibi.to(qkv.device)
        if self.head_scales is not None and self.head_scales.device != qkv.device:
            self.head_scales = self.head_scales.to(qkv.device)
        params = AttentionParams(
            spec.scale,
            spec.window,
            spec.softcap,
            self._sinks_of(qkv),
            self.alibi,
            step.relative_bias,
            self.key_scale,
            self.value_scale,
            self.head_scales,
            spec.is_causal,
        )
        last_token_only = last_layer and step.last_token_only
        heads = ProjectedHeads(qkv, spec.heads, spec.kv_heads, norms, rope)
        options = {"last_layer": last_layer, "last_token_only": last_token_only}
        if self.keeps_keys:
            q, k, v = qk_norm_rope(heads)
            step.stored[self.index] = KeysAndValues(k, v)
            attended = step.attend(self.index, q, k, v, params, **options)
        else:
            attended = step.attend.projected(self.index, heads, params, **options)
        if spec.output_gate:
            if last_token_only and step.logits_indices is not None:
                projected = take_rows(projected, step.logits_indices)
            attended = sigmoid_gate(attended, gates_of(projected, spec.heads, spec.head_dim))
        out: Tensor = self.out(dense_heads(attended), lora=step.lora_rows(last_layer=last_layer))
        return out

    def _sinks_of(self, qkv: Tensor) -> Tensor | None:
        """The sinks as kernels read them; those of CPUs read float32."""
        if self.sinks is None or not native.supports(qkv):
            return self.sinks
        if self._float_sinks is None:
            self._float_sinks = self.sinks.float()
        return self._float_sinks

    def _norm_values(self, qkv: Tensor) -> None:
        spec = self.spec
        values = split_heads(qkv[:, sum(self.qkv.parts[:2]) :], spec.kv_heads, spec.head_dim)
        norm_heads_in_place(values, self._unit_weights(qkv), self._eps)

    def _unit_weights(self, qkv: Tensor) -> Tensor:
        """The weights of norms that have none: (head_dim,)."""
        if self._ones is None or self._ones.dtype != qkv.dtype or self._ones.device != qkv.device:
            self._ones = qkv.new_ones(self.spec.head_dim)
        return self._ones

    def _norm_all(self, qkv: Tensor) -> Tensor:
        """Norms of all heads of queries and of all heads of keys, those of other ranks included."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        q, k, v = qkv.split(self.qkv.parts, -1)
        if self._group is None and isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            rms_norm(q, self.q_norm.weight, self.q_norm.eps, self.q_norm.offset, in_place=True)
            rms_norm(k, self.k_norm.weight, self.k_norm.eps, self.k_norm.offset, in_place=True)
            return qkv
        if self._group is None:
            return torch.cat((self.q_norm(q), self.k_norm(k), v), -1)
        normed = []
        for norm, part in zip(
            (self.q_norm, self.k_norm),
            normalize_over_ranks([q.float(), k.float()], self.q_norm.eps, self._group),
            strict=True,
        ):
            assert isinstance(norm, RMSNorm)  # decoders with a layer norm of all heads are not divided
            normed.append((part.to(qkv.dtype).float() * (norm.weight.float() + norm.offset)).to(qkv.dtype))
        return torch.cat((*normed, v), -1)

    def _norm_heads(self, qkv: Tensor) -> Tensor:
        """Layer norms of each head of queries and keys."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        spec = self.spec
        heads = qkv.unflatten(1, (-1, spec.head_dim)).split((spec.heads, spec.kv_heads, spec.kv_heads), 1)
        return torch.cat((self.q_norm(heads[0]), self.k_norm(heads[1]), heads[2]), 1).flatten(1)

    def _rotated(self, qkv: Tensor, rope: CosSin) -> Tensor:
        """Rotate each head of queries and keys."""
        spec = self.spec
        heads = split_heads(qkv, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        rotated, values = heads.split((spec.heads + spec.kv_heads, spec.kv_heads), 1)
        result = apply_rope(rotated, rope.cos, rope.sin, interleaved=rope.interleaved)
        return qkv if result is rotated else torch.cat((result, values), 1).flatten(1)

    def _norm(self, size: int, model: StackSpec) -> RMSNorm | LayerNorm | None:
        if self.spec.qk_norm is None or self.spec.qk_norm is QKNorm.HEAD_ONLY:
            return None
        return make_norm(self.spec.head_dim if self.spec.qk_norm is QKNorm.HEAD else size, model.norm)
