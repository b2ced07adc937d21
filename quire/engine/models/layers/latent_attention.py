"""Multi-head latent attention (DeepSeek-V2), in its absorbed form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import RMSNorm
from quire.engine.models.layers.parallel import row_parallel
from quire.engine.models.layers.step import StepContext
from quire.engine.models.parallel.group import RankGroup
from quire.engine.models.spec import LatentAttention, StackSpec
from quire.kernels.paged_attention import AttentionParams
from quire.kernels.rope import apply_rope

_EPS = 1e-6  # of the norms of the compressed vectors, independent of the decoder's


class LatentAttentionLayer(nn.Module):
    """Caches one latent vector and one rotated key per token, shared by all heads.

    The up-projections of keys and values are absorbed into queries and outputs: a head's query is taken into the
    latent space, where all heads attend as queries of a single key, and the attended latent is taken out of it.
    """

    def __init__(self, index: int, spec: LatentAttention, model: StackSpec, group: RankGroup | None = None) -> None:
        """`group`: ranks that have other heads; each has the whole cache."""
        super().__init__()
        self.index = index
        self.spec = spec
        queries = spec.heads * (spec.nope_dim + spec.rope.dim)
        if spec.q_rank is not None:
            self.q_a = Linear(model.hidden, spec.q_rank, bias=spec.bias)
            self.q_a_norm = RMSNorm(spec.q_rank, _EPS)
        self.q_b = Linear(spec.q_rank or model.hidden, queries)
        self.kv_a = Linear(model.hidden, spec.kv_rank + spec.rope.dim, bias=spec.bias)
        self.kv_a_norm = RMSNorm(spec.kv_rank, _EPS)
        self.kv_b = Linear(spec.kv_rank, spec.heads * (spec.nope_dim + spec.value_dim), plain=True)
        self.out = row_parallel(spec.heads * spec.value_dim, model.hidden, group, bias=spec.bias)

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        spec = self.spec
        rope = step.ropes[spec.rope]
        q = self.q_b(self.q_a_norm(self.q_a(x)) if spec.q_rank is not None else x)
        q_nope, q_rope = q.unflatten(-1, (spec.heads, -1)).split([spec.nope_dim, spec.rope.dim], -1)
        latent, k_rope = self.kv_a(x).split([spec.kv_rank, spec.rope.dim], -1)
        q_rope, k_rope = (
            apply_rope(part, rope.cos, rope.sin, interleaved=rope.interleaved) for part in (q_rope, k_rope[:, None])
        )
        assert self.kv_b.weight is not None
        up = self.kv_b.weight.view(spec.heads, -1, spec.kv_rank)
        key_up, value_up = up.split([spec.nope_dim, spec.value_dim], 1)
        query = torch.cat((torch.einsum("thn,hnr->thr", q_nope, key_up), q_rope), -1)
        key = torch.cat((self.kv_a_norm(latent)[:, None], k_rope), -1)
        last_token_only = last_layer and step.last_token_only
        attended = step.attend(
            self.index,
            query,
            key,
            None,
            AttentionParams(spec.scale),
            last_layer=last_layer,
            last_token_only=last_token_only,
        )
        out: Tensor = self.out(torch.einsum("thr,hvr->thv", attended, value_up).flatten(1))
        return out
