"""Heads of models that pool: from hidden states to embeddings, labels, scores and sparse vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import LayerNorm
from quire.engine.models.pooler_spec import Dense, HeadStep, PoolerSpec, SparseHead
from quire.engine.models.spec import LayerNormSpec
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
    """log(1 + relu(logits)) of the vocabulary, the largest of all tokens of a text (SPLADE, Formal et al. 2021)."""

    def __init__(self, spec: SparseHead, hidden: int, vocab: int) -> None:
        super().__init__()
        self.dense = Linear(hidden, hidden, bias=True)
        self.norm = LayerNorm(hidden, spec.norm.eps)
        self.bias = nn.Parameter(torch.empty(vocab), requires_grad=False)
        self.act = spec.act

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """(tokens, hidden) to (vocab,) float32; `embedding` (vocab, hidden) is the tied output projection."""
        logits = F.linear(self.norm(ACTIVATIONS[self.act](self.dense(x))), embedding).float() + self.bias.float()
        return F.relu(logits).amax(0).log1p()


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
