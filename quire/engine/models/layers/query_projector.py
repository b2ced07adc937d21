"""The layers of a `QueryProjector`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.mlp import PlainMLPLayer
from quire.engine.models.layers.norm import LayerNorm
from quire.engine.models.specs.audio import QueryProjector


class QueryProjectorLayer(nn.Module):
    """Learned queries, their transformer and the linear layer."""

    def __init__(self, spec: QueryProjector) -> None:
        super().__init__()
        self.spec = spec
        self.query = nn.Parameter(torch.empty(spec.queries, spec.hidden), requires_grad=False)
        self.norm = LayerNorm(spec.hidden, spec.eps)
        self.layers = nn.ModuleList(QueryBlock(spec, index) for index in range(spec.layers))
        self.linear = Linear(spec.hidden, spec.size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """(positions, source) of one item to (windows * queries, size)."""
        window = self.spec.window
        windows = -(-len(x) // window)
        x = F.pad(x, (0, 0, 0, windows * window - len(x)))
        queries = self.norm(self.query).repeat(windows, 1)
        for layer in self.layers:
            queries = layer(queries, x)
        out: Tensor = self.linear(queries)
        return out


class QueryBlock(nn.Module):
    """Attention among the queries of a window, attention to its positions, a feed-forward; norms after the sums."""

    def __init__(self, spec: QueryProjector, index: int) -> None:
        super().__init__()
        self.spec = spec
        hidden, has_cross = spec.hidden, index % spec.cross_every == 0
        self.attn = WindowAttention(spec, hidden)
        self.attn_norm = LayerNorm(hidden, spec.eps)
        self.cross = WindowAttention(spec, spec.source) if has_cross else None
        self.cross_norm = LayerNorm(hidden, spec.eps) if has_cross else None
        self.ffn = PlainMLPLayer(hidden, spec.ffn, spec.act)
        self.ffn_norm = LayerNorm(hidden, spec.eps)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        """(windows * queries, hidden) to the same shape. source: (windows * window, elements)."""
        queries, window = self.spec.queries, self.spec.window
        x = self.attn_norm(self.attn(x, x, queries, queries), x)
        if self.cross is not None and self.cross_norm is not None:
            x = self.cross_norm(self.cross(x, source, queries, window), x)
        normed: Tensor = self.ffn_norm(self.ffn(x), x)
        return normed


class WindowAttention(nn.Module):
    """Attention of the queries of each window to the rows of that window."""

    def __init__(self, spec: QueryProjector, source: int) -> None:
        """`source`: elements of a row that is attended to."""
        super().__init__()
        self.heads = spec.heads
        self.query = Linear(spec.hidden, spec.hidden, bias=True)
        self.key = Linear(source, spec.hidden, bias=True)
        self.value = Linear(source, spec.hidden, bias=True)
        self.out = Linear(spec.hidden, spec.hidden, bias=True)

    def forward(self, x: Tensor, source: Tensor, queries: int, rows: int) -> Tensor:
        """Attend.

        Args:
            x: (windows * queries, hidden).
            source: (windows * rows, elements).
            queries: number of queries of a window.
            rows: number of rows that they attend to.

        Returns:
            (windows * queries, hidden)
        """
        q, k, v = self._split(self.query(x), queries), self._split(self.key(source), rows), self.value(source)
        attended = F.scaled_dot_product_attention(q, k, self._split(v, rows))
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2).flatten(0, 1))
        return out

    def _split(self, x: Tensor, rows: int) -> Tensor:
        """(windows, heads, rows, head_dim)."""
        split: Tensor = x.unflatten(0, (-1, rows)).unflatten(2, (self.heads, -1))
        return split.transpose(1, 2)
