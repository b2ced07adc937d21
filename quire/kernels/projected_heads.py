"""Heads of queries, keys and values as one projection, and what their norms and rotary embedding need."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class QKNormWeights:
    """Weights (dim,) of the norms of query heads and of key heads."""

    query: Tensor
    key: Tensor
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class CosSin:
    """Cosines and sines, each (tokens, pairs) float32; see `quire.kernels.rope.apply_rope`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


@dataclass(frozen=True, slots=True)
class ProjectedHeads:
    """The heads of a layer's tokens before norm and rotary embedding of those of queries and keys.

    Attributes:
        qkv: (tokens, (heads + 2 * kv_heads) * dim) heads of queries, then of keys, then of values. An op that is given
            it may overwrite it.
        norms: None for no norms.
        angles: None for no rotation.
    """

    qkv: Tensor
    heads: int
    kv_heads: int
    norms: QKNormWeights | None
    angles: CosSin | None

    @property
    def split(self) -> Tensor:
        """(tokens, heads + 2 * kv_heads, dim), a view of `qkv`."""
        split: Tensor = self.qkv.unflatten(1, (self.heads + 2 * self.kv_heads, -1))
        return split
