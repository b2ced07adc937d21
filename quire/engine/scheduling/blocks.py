"""BlockPool: allocation and reference counts of KV cache blocks, and the prefix cache over them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import xxhash

from quire.engine.scheduling.block_observer import BlockObserver, StoredBlock
from quire.engine.scheduling.request import BlockHash, ExtraKey, Hasher, Request
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


@dataclass(frozen=True, slots=True, eq=False)
class FilledBlock:
    """A block of a request's tokens that is registered in the prefix cache, and that a step in flight fills.

    Attributes:
        index: which of the request's blocks it is.
        group: index of the group of layers that it is of.
        hashes: the hashes of the request's blocks, of which there may be more.
        extra_keys: see `StoredBlock`; empty if there is no observer.
    """

    block: int
    request: Request
    index: int
    group: int
    hashes: list[BlockHash]
    extra_keys: tuple[ExtraKey, ...]


class BlockPool:
    """Reference counts of all blocks, content hashes of the cached ones, and an LRU list of the free ones.

    A free block keeps its content until it is allocated again, least recently used first. Until then a request with
    the same prefix can reuse it.

    A block is registered when the step that fills it is planned, and computed when that step has ended. Steps run in
    order, so later ones may read a registered block; observers are told of computed blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        residency: BlockResidency | None = None,
        observers: Sequence[BlockObserver] = (),
    ) -> None:
        """Make a pool of free blocks.

        Args:
            num_blocks: their number.
            block_size: tokens of each.
            residency: is told what happens to blocks; None: nobody wants to know.
            observers: are told which blocks are computed, and which are lost.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.residency = residency
        self._observers = tuple(observers)
        self._filling: dict[int, FilledBlock] = {}  # blocks of tokens that are registered and not computed
        self._stored: dict[int, tuple[BlockHash, int]] = {}  # those that observers know, with hash and group
        self._refs = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def is_observed(self) -> bool:
        """Whether anybody is told which blocks are computed."""
        return bool(self._observers)

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

    def computed(self, key: BlockHash) -> int | None:
        """Return the cached block with a key, once the step that fills it has ended; None: there is none."""
        block = self._by_hash.get(key)
        return None if block is None or block in self._filling else block

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

    def cache_block(self, block: int, key: BlockHash) -> bool:
        """Register an allocated block in the prefix cache; False: it has a hash, or an equal block is registered."""
        if self._hash_of[block] is not None or key in self._by_hash:
            return False
        self._hash_of[block] = key
        self._by_hash[key] = block
        return True

    def fill(self, filled: FilledBlock) -> None:
        """Note that a step was planned that fills a block, which has been registered."""
        self._filling[filled.block] = filled

    def finish(self, filled: FilledBlock, *, failed: bool) -> None:
        """Note that the step has ended that fills a block. `failed`: it may not have, so nobody is to find it."""
        if self._filling.get(filled.block) is not filled:
            return  # evicted meanwhile
        if failed:
            self._evict(filled.block, is_valid=False)
            return
        del self._filling[filled.block]
        if self._observers and filled.request.is_shared:
            stored = self._describe(filled)
            self._stored[stored.block] = (stored.key, stored.group)
            for observer in self._observers:
                observer.stored(stored)

    def _describe(self, filled: FilledBlock) -> StoredBlock:
        index, start = filled.index, filled.index * self.block_size
        tokens = filled.request.tokens[start : start + self.block_size]
        parent = filled.hashes[index - 1] if index else None
        return StoredBlock(filled.block, filled.hashes[index], parent, tokens, filled.group, filled.extra_keys)

    def evict_blocks(self, blocks: Iterable[int]) -> None:
        """Invalidate the cached content of blocks, which may be in use: other requests will not find it."""
        for block in blocks:
            self._evict(block, is_valid=False)

    def evict_all(self) -> None:
        """Invalidate the cached content of all blocks; those in use stay so."""
        self._stored.clear()
        for observer in self._observers:
            observer.cleared()
        self.evict_blocks([*self._by_hash.values()])
        self.end_step()

    def end_step(self) -> None:
        """Tell observers that a step has ended."""
        for observer in self._observers:
            observer.step_ended()

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
        assert all(self._hash_of[block] is not None for block in self._filling), "an evicted block is being filled"
        assert self._filling.keys().isdisjoint(self._stored), "a block is stored and being filled"
        assert all(self._hash_of[block] is not None for block in self._stored), "an evicted block is stored"

    def _evict(self, block: int, *, is_valid: bool = True) -> None:
        key = self._hash_of[block]
        if key is not None:
            del self._by_hash[key]
            self._hash_of[block] = None
            self._filling.pop(block, None)
            if self.residency is not None:
                self.residency.evicted(block)
            if (stored := self._stored.pop(block, None)) is not None:
                for observer in self._observers:
                    (observer.removed if is_valid else observer.invalidated)(block, *stored)
