"""Attention of single queries to selected positions of a sequence, and their selection by an indexer, in torch.

A query is computed alone, from the positions up to its own: its bits do not depend on how many others a step has.
"""

from __future__ import annotations

from torch import Tensor


def select_positions(query: Tensor, weights: Tensor, keys: Tensor, top_k: int) -> Tensor:
    """The positions with the highest sums over heads of weight * relu(query * key), in their order.

    Args:
        query: (heads, dim).
        weights: (heads,) float32.
        keys: (positions, dim), more than `top_k`.
        top_k: number of positions.

    Returns:
        (top_k,) int64
    """
    scores = (keys.float() @ query.float().mT).relu_() @ weights
    positions: Tensor = scores.topk(top_k).indices.sort().values
    return positions


def attend_to(query: Tensor, keys: Tensor, value_dim: int, scale: float) -> Tensor:
    """Attend to all keys, whose first elements are the values.

    Args:
        query: (heads, dim).
        keys: (positions, dim).
        value_dim: elements of a value.
        scale: factor of the scores.

    Returns:
        (heads, value_dim) in the dtype of the query.
    """
    keys = keys.float()
    weights = ((query.float() @ keys.mT) * scale).softmax(-1)
    return (weights @ keys[:, :value_dim]).to(query.dtype)
