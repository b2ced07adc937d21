"""Disentangled attention (He et al. 2021): queries and keys of contents and of relative positions."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import LayerNorm
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.decoder import DisentangledAttention, LayerNormSpec, StackSpec


def _span(spec: DisentangledAttention) -> int:
    """Relative positions in each direction."""
    return spec.buckets or spec.max_distance


class RelativePositions(nn.Module):
    """The table of relative positions that all layers share."""

    def __init__(self, spec: DisentangledAttention, model: StackSpec) -> None:
        super().__init__()
        assert isinstance(model.norm, LayerNormSpec)
        self.weight = nn.Parameter(torch.empty(2 * _span(spec), model.hidden), requires_grad=False)
        self.norm = LayerNorm(model.hidden, model.norm.eps) if spec.norm_positions else None

    def forward(self) -> Tensor:
        """(rows, hidden)."""
        return self.weight if self.norm is None else self.norm(self.weight)


class DisentangledAttentionLayer(nn.Module):
    """Each sequence attends to itself, with the scores of contents and of relative positions summed."""

    def __init__(
        self, index: int, spec: DisentangledAttention, model: StackSpec, group: RankGroup | None = None
    ) -> None:
        """`index` and `group` are not read: encoders have no cache, and are not divided among ranks."""
        super().__init__()
        self.spec = spec
        size = spec.heads * spec.head_dim
        self.qkv = Linear(model.hidden, size, size, size, bias=True)
        self.out = Linear(size, model.hidden, bias=True)
        self.pos_q = None if spec.share_keys or not spec.from_position else Linear(model.hidden, size, bias=True)
        self.pos_k = None if spec.share_keys or not spec.to_position else Linear(model.hidden, size, bias=True)

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden)."""
        assert step.cu_seqlens is not None
        assert step.relative_positions is not None
        pos_q, pos_k = self._project_positions(step.relative_positions)
        q, k, v = (part.unflatten(1, (self.spec.heads, -1)).transpose(0, 1) for part in self.qkv(x).chunk(3, 1))
        bounds = step.cu_seqlens.tolist()
        attended = [self._attend(q[:, a:b], k[:, a:b], v[:, a:b], pos_q, pos_k) for a, b in itertools.pairwise(bounds)]
        out: Tensor = self.out(torch.cat(attended, 1).transpose(0, 1).flatten(1))
        return out

    def _project_positions(self, table: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Queries and keys of relative positions, each (heads, rows, head_dim)."""
        spec = self.spec
        if spec.share_keys:
            q, k, _ = self.qkv(table).chunk(3, 1)
        else:
            q = None if self.pos_q is None else self.pos_q(table)
            k = None if self.pos_k is None else self.pos_k(table)
        projected = (q if spec.from_position else None, k if spec.to_position else None)
        q, k = (None if rows is None else rows.unflatten(1, (spec.heads, -1)).transpose(0, 1) for rows in projected)
        return q, k

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, pos_q: Tensor | None, pos_k: Tensor | None) -> Tensor:
        spec, length = self.spec, q.shape[1]
        scale = 1 / math.sqrt(spec.head_dim * (1 + spec.to_position + spec.from_position))
        position = torch.arange(length, device=q.device)
        rows = relative_rows(spec, position[:, None] - position)
        scores = torch.zeros(spec.heads, length, length, device=q.device)
        if pos_k is not None:
            to_position = torch.matmul(q, pos_k.transpose(1, 2))  # (heads, length, rows)
            scores = scores + to_position.gather(2, rows.expand(spec.heads, -1, -1)).float()
        if pos_q is not None:
            from_position = torch.matmul(k, pos_q.transpose(1, 2))
            scores = scores + from_position.gather(2, rows.T.expand(spec.heads, -1, -1)).transpose(1, 2).float()
        bias = (scores * scale).to(q.dtype)
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias[None], scale=scale)[0]


def relative_rows(spec: DisentangledAttention, relative: Tensor) -> Tensor:
    """Row of the table for each relative position, query minus key."""
    span = _span(spec)
    if spec.buckets:
        relative = _log_buckets(relative, spec.buckets, spec.max_distance)
    return (relative + span).clamp(0, 2 * span - 1)


def _log_buckets(relative: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Distances up to half of the buckets are their own bucket, larger ones share logarithmic buckets."""
    middle = buckets // 2
    near = (relative < middle) & (relative > -middle)
    distance = torch.where(near, middle - 1, relative.abs())
    far = torch.ceil(torch.log(distance / middle) / math.log((max_distance - 1) / middle) * (middle - 1)) + middle
    return torch.where(distance <= middle, relative, (far * relative.sign()).long())
