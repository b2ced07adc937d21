"""BlockPool: allocation and reference counts of KV cache blocks, and the prefix cache over them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal

import xxhash

from quire.engine.scheduling.request import BlockHash, Hasher
from quire.engine.scheduling.residency import BlockResidency


class OutOfBlocks(Exception):
    """More blocks were requested than are free."""


def hasher_named(name: Literal["sha256", "xxhash"]) -> Hasher:
    """Return the hash function that an option names."""
    return _sha256 if name == "sha256" else _xxh3


def _sha256(data: bytes) -> BlockHash:
    return hashlib.sha256(data).digest()


def _xxh3(data: bytes) -> BlockHash:
    return bytes(xxhash.xxh3_128_digest(data))


class BlockPool:
    """Reference counts of all blocks, content hashes of the cached ones, and an LRU list of the free ones.

    A free block keeps its content until it is allocated again, least recently used first. Until then a request with
    the same prefix can reuse it.
    """

    def __init__(self, num_blocks: int, block_size: int, residency: BlockResidency | None = None) -> None:
        """`residency`: is told what happens to blocks; None: nobody wants to know."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.residency = residency
        self._refs = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks without a reference, including those with cached content."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the cached blocks of the longest known prefix; takes no references."""
        blocks = []
        for key in hashes:
            block = self._by_hash.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def has(self, key: BlockHash) -> bool:
        """Return whether a block is cached."""
        return key in self._by_hash

    def can_take(self, matched: Sequence[int], fresh: int) -> bool:
        """Whether `acquire(matched)` followed by `allocate(fresh)` would succeed."""
        free_matches = sum(1 for block in matched if self._refs[block] == 0)
        return fresh + free_matches <= len(self._free)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; the blocks are in use or have cached content."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1
            if self.residency is not None:
                self.residency.reused(block)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` free blocks and evict their cached content.

        Raises:
            OutOfBlocks: fewer blocks are free; none is allocated.
        """
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks requested, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._evict(block)
            self._refs[block] = 1
            if self.residency is not None:
                self.residency.allocated(block)
        return blocks

    def cache_block(self, block: int, key: BlockHash) -> None:
        """Register an allocated block in the prefix cache. Of two equal blocks the first stays registered."""
        if self._hash_of[block] is None and key not in self._by_hash:
            self._hash_of[block] = key
            self._by_hash[key] = block

    def evict_blocks(self, blocks: Iterable[int]) -> None:
        """Invalidate the cached content of blocks, which may be in use: other requests will not find it."""
        for block in blocks:
            self._evict(block)

    def evict_all(self) -> None:
        """Invalidate the cached content of all blocks; those in use stay so."""
        self.evict_blocks([*self._by_hash.values()])

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block. The last blocks of a sequence are evicted before its first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self.residency is not None:
                    self.residency.released(block)
                if self._hash_of[block] is None:  # no cached content: allocate it first
                    self._free.move_to_end(block, last=False)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that the pool is consistent with the block tables of all holders."""
        held = [0] * self.num_blocks
        for table in holders:
            for block in table:
                held[block] += 1
        assert held == self._refs, "reference counts differ from block tables"
        # As many as are free, and all of them are; most blocks are free and unknown, so no loop is over all blocks.
        assert len(self._free) == self._refs.count(0), "free list differs"
        assert not any(map(self._refs.__getitem__, self._free)), "free list differs"
        assert len(self._by_hash) == self.num_blocks - self._hash_of.count(None), "hash tables differ"
        assert all(self._hash_of[block] == key for key, block in self._by_hash.items()), "hash tables differ"

    def _evict(self, block: int) -> None:
        key = self._hash_of[block]
        if key is not None:
            del self._by_hash[key]
            self._hash_of[block] = None
            if self.residency is not None:
                self.residency.evicted(block)
