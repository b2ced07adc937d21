"""Attention to keys and values that an earlier layer has stored."""

from __future__ import annotations

from torch import Tensor, nn

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import RMSNorm, make_norm
from quire.engine.models.layers.parallel import row_parallel
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.decoder import StackSpec
from quire.engine.models.specs.shared_keys import SharedKeysAttention
from quire.kernels.paged_attention import AttentionParams
from quire.kernels.projected_heads import ProjectedHeads, QKNormWeights
from quire.kernels.qk_norm_rope import qk_norm_rope


class SharedKeysLayer(nn.Module):
    """A projection of queries, an optional norm, rope, attention, output projection."""

    def __init__(self, index: int, spec: SharedKeysAttention, model: StackSpec, group: RankGroup | None = None) -> None:
        """`group`: ranks that have other heads; `index` is not read."""
        super().__init__()
        self.spec = spec
        size = spec.heads * spec.head_dim
        self.q = Linear(model.hidden, size, bias=spec.q_bias)
        self.out = row_parallel(size, model.hidden, group, bias=spec.out_bias)
        self.q_norm = make_norm(spec.head_dim, model.norm) if spec.qk_norm else None

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        spec, norms = self.spec, None
        if isinstance(self.q_norm, RMSNorm):
            weight = self.q_norm.weight
            norms = QKNormWeights(weight, weight, self.q_norm.eps, self.q_norm.offset)
        projected = self.q(x, lora=step.lora_rows(last_layer=False))
        rope = None if spec.rope is None else step.ropes[spec.rope]
        queries, _, _ = qk_norm_rope(ProjectedHeads(projected, spec.heads, 0, norms, rope))
        attended = step.attend.read(
            spec.source,
            queries,
            AttentionParams(spec.scale, spec.window, is_causal=spec.is_causal),
            last_layer=last_layer,
            last_token_only=last_layer and step.last_token_only,
        )
        out: Tensor = self.out(attended.flatten(1), lora=step.lora_rows(last_layer=last_layer))
        return out
