"""A recurrence behind a block of attention and a feed-forward, whose weights several layers have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from quire.engine.models.specs.cache import CacheShape, ChunkCache, FullCache, StateCache, WindowCache
from quire.engine.models.specs.decoder import Attention, GatedMLP, GroupedQueryAttention, Layer, Recurrence


@dataclass(frozen=True, kw_only=True)
class BlockBeforeRecurrence(Attention):
    """recurrence(norm(x + project(ffn(norm(attention(norm(x, embedding))))))) (Zamba 2).

    The attention reads the hidden state and the token's embedding, one behind the other. Its residual, and that of the
    feed-forward, do not exist.

    Attributes:
        block: which of the model's blocks this is: layers with the same one have its weights in common.
        rank: elements between the two projections that each layer adds to the first one of the feed-forward.
        attention_rank: the same for queries, keys and values; None: there are none.
    """

    description: ClassVar = "blocks of attention that layers have in common"
    positive: ClassVar = ("rank",)

    attention: GroupedQueryAttention
    ffn: GatedMLP
    recurrence: Recurrence
    block: int
    rank: int
    attention_rank: int | None = None

    @property
    def cache(self) -> FullCache | WindowCache | ChunkCache:
        """What the attention keeps."""
        return self.attention.cache

    @property
    @override
    def state_beside(self) -> StateCache:
        return self.recurrence.cache

    @override
    def cache_shape(self, alignment: int = 1) -> CacheShape:
        return self.attention.cache_shape(alignment)


def any_reads_embedded(layers: Iterable[Layer]) -> bool:
    """Return whether any of the layers reads the embedding of the token."""
    return any(isinstance(layer.attn, BlockBeforeRecurrence) for layer in layers)
