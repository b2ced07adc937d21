"""The queries, keys and weights of an indexer, which selects the tokens that attention reads (DeepSeek-V3.2)."""

from __future__ import annotations

from torch import Tensor, nn

from quire.engine.models.layers.inputs import IndexQueries
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.moe import Router
from quire.engine.models.layers.norm import LayerNorm
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.decoder import Indexer
from quire.kernels.capture import split_heads
from quire.kernels.rope import apply_rope

_EPS = 1e-6  # of the norm of keys, independent of the decoder's


class IndexerLayer(nn.Module):
    """Projections of queries from compressed ones, of keys, and of the weights of heads, which are float32."""

    def __init__(self, spec: Indexer, hidden: int, q_rank: int) -> None:
        """`hidden`: elements of the layer's input; `q_rank`: those of compressed queries."""
        super().__init__()
        self.spec = spec
        self.q_b = Linear(q_rank, spec.heads * spec.dim)
        self.k = Linear(hidden, spec.dim)
        self.k_norm = LayerNorm(spec.dim, _EPS)
        self.weights = Router(hidden, spec.heads, bias=False)

    def keys(self, x: Tensor, step: StepContext) -> Tensor:
        """Keys (tokens, 1, dim) of the layer's input (tokens, hidden)."""
        return self._rotated(self.k_norm(self.k(x))[:, None], step)

    def queries(self, x: Tensor, compressed: Tensor, step: StepContext) -> IndexQueries:
        """The queries of the layer's input, and of its compressed queries (tokens, q_rank).

        Models scale the weights by (heads * dim) ** -0.5, which changes no order of scores.
        """
        queries = split_heads(self.q_b(compressed), self.spec.heads, self.spec.dim)
        return IndexQueries(self._rotated(queries, step), self.weights.logits(x))

    def _rotated(self, x: Tensor, step: StepContext) -> Tensor:
        if self.spec.rope is None:
            return x
        rope = step.ropes[self.spec.rope]
        return apply_rope(x, rope.cos, rope.sin, interleaved=rope.interleaved)
