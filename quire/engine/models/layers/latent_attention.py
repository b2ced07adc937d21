"""Multi-head latent attention (DeepSeek-V2), in its absorbed form."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from typing_extensions import override

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.indexer import IndexerLayer
from quire.engine.models.layers.inputs import Selection
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import RMSNorm
from quire.engine.models.layers.parallel import row_parallel
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.decoder import LatentAttention, StackSpec
from quire.kernels.capture import split_heads
from quire.kernels.copy_rows import copy_rows, empty_like, join_columns
from quire.kernels.head_linear import HeadWeight, pack_head_weight, reference
from quire.kernels.linear import Quantization
from quire.kernels.paged_attention import AttentionParams
from quire.kernels.rope import apply_rope

_EPS = 1e-6  # of the norms of the compressed vectors, independent of the decoder's


class UpProjections(Linear):
    """Up-projections of keys and values from the latent space, for each head. They are never quantized."""

    is_exact = True

    def __init__(self, spec: LatentAttention) -> None:
        super().__init__(spec.kv_rank, spec.heads * (spec.nope_dim + spec.value_dim))
        self._heads = spec.heads
        self._sizes = spec.nope_dim, spec.value_dim
        self._keys: HeadWeight | None = None
        self._values: HeadWeight | None = None

    @override
    def pack_weights(self, quantization: Quantization) -> None:
        if self.weight is None:
            return
        self._keys, self._values = (pack_head_weight(part) for part in self._views())
        if self._keys is not None and self._values is not None:
            self.weight = None

    @property
    @override
    def packed_bytes(self) -> int:
        return sum(0 if part is None else part.nbytes for part in (self._keys, self._values))

    def absorb(self, q: Tensor, out: Tensor) -> None:
        """Queries (tokens, heads, nope_dim) in the latent space: the product with the transposed weight of keys.

        out: (tokens, heads, kv_rank), written to.
        """
        if self._keys is None:
            reference(q, self._views()[0], out=out)
        else:
            self._keys(q, out=out)

    def values(self, attended: Tensor) -> Tensor:
        """(tokens, heads, kv_rank) to (tokens, heads, value_dim)."""
        return reference(attended, self._views()[1]) if self._values is None else self._values(attended)

    def _views(self) -> tuple[Tensor, Tensor]:
        """The transposed weight of keys (heads, kv_rank, nope_dim), and that of values (heads, value_dim, kv_rank)."""
        assert self.weight is not None
        keys, values = self.weight.unflatten(0, (self._heads, -1)).split(self._sizes, 1)
        return keys.mT, values


class LatentAttentionLayer(nn.Module):
    """Attention that caches one latent vector and one rotated key per token, shared by all heads.

    The up-projections of keys and values are absorbed into queries and outputs: a head's query is taken into the
    latent space, where all heads attend as queries of a single key, and the attended latent is taken out of it.

    Attributes:
        key_scale: scale of a KV cache of float8; 1 if the checkpoint has none.
        value_scale: the checkpoint's scale of values. Values are a part of keys: a KV cache of float8 has one scale.
    """

    def __init__(self, index: int, spec: LatentAttention, model: StackSpec, group: RankGroup | None = None) -> None:
        """`group`: ranks that have other heads; each has the whole cache."""
        super().__init__()
        self.index = index
        self.spec = spec
        queries = spec.heads * (spec.nope_dim + spec.shared_dim)
        if spec.q_rank is not None:
            self.q_a = Linear(model.hidden, spec.q_rank, bias=spec.bias)
            self.q_a_norm = RMSNorm(spec.q_rank, _EPS)
        self.q_b = Linear(spec.q_rank or model.hidden, queries)
        self.kv_a = Linear(model.hidden, spec.kv_rank + spec.shared_dim, bias=spec.bias)
        self.kv_a_norm = RMSNorm(spec.kv_rank, _EPS)
        self.kv_b = UpProjections(spec)
        self.out = row_parallel(spec.heads * spec.value_dim, model.hidden, group, bias=spec.bias)
        has_indexer = spec.indexer is not None and not spec.indexer.is_shared
        self.indexer: IndexerLayer | None = None
        if has_indexer:
            assert spec.indexer is not None
            assert spec.q_rank is not None
            self.indexer = IndexerLayer(spec.indexer, model.hidden, spec.q_rank)
        self.key_scale = self.value_scale = 1.0

    def forward(self, x: Tensor, step: StepContext, *, last_layer: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), or to (len(logits_indices), hidden); see `StepAttention`."""
        spec = self.spec
        compressed = self.q_a_norm(self.q_a(x)) if spec.q_rank is not None else x
        q = self.q_b(compressed)
        heads = split_heads(q, spec.heads, spec.nope_dim + spec.shared_dim)
        q_nope, q_rope = heads.split([spec.nope_dim, spec.shared_dim], -1)
        latent, k_rope = self.kv_a(x).split([spec.kv_rank, spec.shared_dim], -1)
        k_rope = k_rope[:, None]
        if spec.rope is not None:
            rope = step.ropes[spec.rope]
            q_rope, k_rope = (
                apply_rope(part, rope.cos, rope.sin, interleaved=rope.interleaved) for part in (q_rope, k_rope)
            )
        query = empty_like(q, (len(q), spec.heads, spec.key_dim))
        self.kv_b.absorb(q_nope, query[..., : spec.kv_rank])
        cached = spec.kv_rank + spec.shared_dim
        # Behind them are zeros where keys of an indexer lie, which attention does not read.
        copy_rows(q_rope, query[..., spec.kv_rank :])
        parts = [self.kv_a_norm(latent), k_rope[:, 0]]
        if self.indexer is not None:
            parts.append(self.indexer.keys(x, step)[:, 0])
        key = join_columns(parts)[:, None]
        params = AttentionParams(spec.scale, key_scale=self.key_scale, value_scale=self.key_scale)
        attend = partial(step.attend, v=None)
        if spec.indexer is not None:
            queries = None if self.indexer is None else partial(self.indexer.queries, x, compressed, step)
            attend = partial(
                step.attend.selected, selection=Selection(spec.indexer.top_k, cached, queries, step.selected)
            )
        last_token_only = last_layer and step.last_token_only
        attended = attend(self.index, query, key, params=params, last_layer=last_layer, last_token_only=last_token_only)
        out: Tensor = self.out(self.kv_b.values(attended).flatten(1))
        return out
