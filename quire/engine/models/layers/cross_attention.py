"""Cross-attention: a decoder's tokens attend to the output of an encoder."""

from __future__ import annotations

from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.step import StepContext
from quire.engine.models.specs.decoder import CrossAttention
from quire.kernels.paged_attention import AttentionParams


class CrossAttentionLayer(nn.Module):
    """Projections; the keys and values of an encoder's output are computed once and then cached."""

    def __init__(self, index: int, spec: CrossAttention, hidden: int, source: int) -> None:
        """`source`: elements of a position of the encoder's output."""
        super().__init__()
        self.index = index
        self.spec = spec
        size = spec.heads * spec.head_dim
        self.q = Linear(hidden, size, bias=spec.bias)
        self.k = Linear(source, size)
        self.v = Linear(source, size, bias=spec.bias)
        self.out = Linear(size, hidden, bias=spec.bias)
        self.params = AttentionParams(spec.scale)

    def keys_and_values(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `encoded` (positions, source), each (positions, heads, head_dim)."""
        heads = (self.spec.heads, self.spec.head_dim)
        return self.k(encoded).unflatten(1, heads), self.v(encoded).unflatten(1, heads)

    def forward(self, x: Tensor, step: StepContext, *, logits_rows: bool = False) -> Tensor:
        """(tokens, hidden) to (tokens, hidden); see `StepCrossAttention` for `logits_rows`."""
        assert step.cross is not None
        q = self.q(x).unflatten(1, (self.spec.heads, self.spec.head_dim))
        out: Tensor = self.out(step.cross(self.index, q, self.params, logits_rows=logits_rows).flatten(1))
        return out
