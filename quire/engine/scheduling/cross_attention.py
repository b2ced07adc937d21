"""CrossAttentionBlocks: KV blocks of encoded positions, for cross-attention."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.client.convolutions import Convolution, count_positions
from quire.engine.client.protocol import AudioItem, StepStats
from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.plan import CrossAttentionItem
from quire.engine.scheduling.request import BlockHash, CrossAttentionState, Hasher, Request


class CrossAttentionBlocks:
    """Take an item's blocks from the pool when its sequence enters the batch: all of them, filled in that step.

    They are found again by the item's hash, as long as all of them are cached.
    """

    def __init__(self, pool: BlockPool, hasher: Hasher | None, convolutions: Sequence[Convolution]) -> None:
        """`convolutions`: see `SchedulerLimits`; the other arguments are the scheduler's."""
        self._pool = pool
        self._hasher = hasher
        self._convolutions = convolutions

    def attach(self, request: Request, item: AudioItem) -> None:
        """Let all tokens of a new request attend to an item: their keys depend on it, too."""
        length = count_positions(self._convolutions, item.features.shape[1])
        hashes: list[BlockHash] = []
        if self._hasher is not None:
            key = self._hasher(request.root_hash + b"item" + item.hash)
            request.root_hash = self._hasher(key + b"tokens")
            request.first_keys.append(f"item {item.hash.hex()}")
            hashes = [self._hasher(key + b"block%d" % index) for index in range(self._pool.blocks_for(length))]
        request.cross_attention = CrossAttentionState(item, length, hashes)

    def cached(self, cross: CrossAttentionState | None) -> list[int]:
        """The blocks of an item that is still encoded; none if only some of them are left."""
        if cross is None or not cross.hashes:
            return []
        blocks = self._pool.match(cross.hashes)
        if len(blocks) == len(cross.hashes):
            return blocks
        self._pool.evict_blocks(blocks)  # no sequence uses them: each sequence uses all blocks of an item
        return []

    def enter(self, cross: CrossAttentionState, cached: list[int], stats: StepStats) -> CrossAttentionItem:
        """Take the blocks of an item, which this step fills unless they are cached."""
        stats.item_queries += 1
        if cached:
            self._pool.acquire(cached)
            cross.blocks = cached
            stats.item_hits += 1
            return CrossAttentionItem(tuple(cached), cross.length, None)
        cross.blocks = self._pool.allocate(self._pool.blocks_for(cross.length))
        for block, key in zip(cross.blocks, cross.hashes, strict=False):  # without a prefix cache there are no hashes
            self._pool.cache_block(block, key)
        return CrossAttentionItem(tuple(cross.blocks), cross.length, cross.item)

    def check(self, request: Request) -> None:
        """Assert that a request holds the blocks of its item while it is in the batch."""
        if (cross := request.cross_attention) is not None:
            needed = self._pool.blocks_for(cross.length) if request.in_batch else 0
            assert len(cross.blocks) == needed, "encoded positions without a block"

    def leave(self, cross: CrossAttentionState | None) -> None:
        """Give the blocks of an item back."""
        if cross is not None:
            self._pool.release(cross.blocks)
            cross.blocks = []
