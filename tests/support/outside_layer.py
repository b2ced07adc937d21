"""The layer of `SeparateAttention`, which a package outside of Quire brings; imported when a model is built."""

from __future__ import annotations

from torch import Tensor, nn

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.decoder import StackSpec
from quire.kernels.paged_attention import AttentionParams
from quire.kernels.rope import apply_rope
from tests.support.outside_family import SeparateAttention


class SeparateAttentionLayer(nn.Module):
    """Three projections, rope, paged attention, output projection."""

    def __init__(self, index: int, spec: SeparateAttention, model: StackSpec, group: RankGroup | None = None) -> None:
        """`group` is not read: the layer is not divided."""
        super().__init__()
        self.index, self.spec = index, spec
        self.q = Linear(model.hidden, spec.heads * spec.head_dim)
        self.k, self.v = (Linear(model.hidden, spec.kv_heads * spec.head_dim) for _ in "kv")
        self.out = Linear(spec.heads * spec.head_dim, model.hidden)

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        rope = step.ropes[self.spec.rope]
        q, k, v = (project(x).unflatten(1, (-1, self.spec.head_dim)) for project in (self.q, self.k, self.v))
        q, k = (apply_rope(part, rope.cos, rope.sin, interleaved=rope.interleaved) for part in (q, k))
        params, last_token_only = AttentionParams(self.spec.scale), last_layer and step.last_token_only
        attended = step.attend(self.index, q, k, v, params, last_layer=last_layer, last_token_only=last_token_only)
        out: Tensor = self.out(attended.flatten(1))
        return out
