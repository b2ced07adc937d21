"""The contrastive loss: among all texts of a step a query has to be closest to its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

NEVER = -1e4


def contrastive_loss(
    embeddings: Tensor, queries: int, allowed: Tensor, temperature: float, dimensions: tuple[int, ...]
) -> Tensor:
    """Return the mean loss over numbers of dimensions, in both directions.

    ``embeddings`` are those of the queries, then of their texts in the same order, then of wrong texts. ``allowed``
    (queries, texts) is false for texts that are not counted as wrong answers.
    """
    rows = torch.arange(queries)
    total = torch.zeros(())
    for size in dimensions:
        cut = F.normalize(embeddings[:, :size], dim=-1)
        scores = (cut[:queries] @ cut[queries:].T / temperature).masked_fill(~allowed, NEVER)
        back = scores[:, :queries].T
        total = total + 0.5 * (F.cross_entropy(scores, rows) + F.cross_entropy(back, rows))
    return total / len(dimensions)


def share_right(embeddings: Tensor, queries: int, allowed: Tensor) -> float:
    """Return the share of queries whose own text is the closest."""
    unit = F.normalize(embeddings, dim=-1)
    scores = (unit[:queries] @ unit[queries:].T).masked_fill(~allowed, NEVER)
    return float((scores.argmax(-1) == torch.arange(queries)).float().mean())
