"""Heads of models that pool: from hidden states to embeddings, labels, scores and sparse vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import LayerNorm
from quire.engine.models.specs.decoder import LayerNormSpec
from quire.engine.models.specs.pooler import Dense, HeadStep, PoolerSpec, SparseHead
from quire.kernels.activation import ACTIVATIONS


class HeadLayer(nn.Module):
    """One step of a head."""

    def __init__(self, spec: Dense, hidden: int) -> None:
        super().__init__()
        size_in = spec.size_in or hidden
        # In float32 from here on: the rows are few, and their results are returned to users.
        self.weight = nn.Parameter(torch.empty(spec.size_out, size_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(spec.size_out), requires_grad=False) if spec.bias else None
        self.act = spec.act

    def forward(self, x: Tensor) -> Tensor:
        """(rows, size_in) to (rows, size_out), float32."""
        bias = None if self.bias is None else self.bias.float()
        return ACTIVATIONS[self.act](F.linear(x.float(), self.weight.float(), bias))


class HeadNorm(nn.Module):
    """Layer norm in float32."""

    def __init__(self, dim: int, spec: LayerNormSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(dim), requires_grad=False) if spec.bias else None
        self.eps = spec.eps

    def forward(self, x: Tensor) -> Tensor:
        """(rows, dim) float32."""
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x, x.shape[-1:], self.weight.float(), bias, self.eps)


class SparseHeadLayer(nn.Module):
    """Logits of a masked language model (SPLADE, Formal et al. 2021)."""

    def __init__(self, spec: SparseHead, hidden: int, vocab: int) -> None:
        super().__init__()
        self.spec = spec
        size = hidden if spec.dense is None else spec.dense.size_out
        self.dense = None if spec.dense is None else Linear(hidden, size, bias=spec.dense.bias)
        self.norm = None if spec.norm is None else LayerNorm(size, spec.norm.eps, bias=spec.norm.bias)
        self.bias = nn.Parameter(torch.empty(vocab), requires_grad=False) if spec.bias else None
        self.table = None if spec.tied else nn.Parameter(torch.empty(vocab, size), requires_grad=False)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, vocab) float32; `embedding` (vocab, size): a tied output projection."""
        if self.dense is not None and self.spec.dense is not None:
            x = ACTIVATIONS[self.spec.dense.act](self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        logits = F.linear(x, embedding if self.table is None else self.table).float()
        return logits if self.bias is None else logits + self.bias.float()


class PoolerHeads(nn.Module):
    """All heads of a `PoolerSpec`."""

    def __init__(self, spec: PoolerSpec, hidden: int, vocab: int) -> None:
        super().__init__()
        self.spec = spec
        self.embed = _steps(spec.embed, hidden)
        self.token_embed = _steps(spec.token_embed, hidden)
        self.classify = _steps(spec.classify, hidden)
        self.sparse_head = None if spec.sparse_head is None else SparseHeadLayer(spec.sparse_head, hidden, vocab)


def run_steps(steps: nn.ModuleList, x: Tensor) -> Tensor:
    """Run the steps of a head on (rows, hidden) float32."""
    for step in steps:
        x = step(x)
    return x.float()


def _steps(steps: Sequence[HeadStep], hidden: int) -> nn.ModuleList:
    return nn.ModuleList(
        HeadLayer(step, hidden) if isinstance(step, Dense) else HeadNorm(hidden, step) for step in steps
    )
