"""BlockPool: who holds which KV block, and which content the free ones still have."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal

import xxhash

from quire.engine.scheduling.request import BlockHash, Hasher


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for."""


def hasher_named(name: Literal["sha256", "xxhash"]) -> Hasher:
    """The hash function for block contents."""
    return _sha256 if name == "sha256" else _xxh3


def _sha256(data: bytes) -> BlockHash:
    return hashlib.sha256(data).digest()


def _xxh3(data: bytes) -> BlockHash:
    return bytes(xxhash.xxh3_128_digest(data))


class BlockPool:
    """Reference counts of all blocks, content hashes of some, and the free ones in order of last use.

    A free block keeps its content until it is handed out again, least recently used first, so a later request
    with the same beginning can take it back.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks so many tokens fill."""
        return -(-tokens // self.block_size)

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Blocks that hold the longest known beginning. They are not held yet."""
        found = []
        for key in hashes:
            block = self._by_hash.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def can_take(self, matched: Sequence[int], fresh: int) -> bool:
        """Whether `hold(matched)` and then `allocate(fresh)` would work."""
        revived = sum(1 for block in matched if self._refs[block] == 0)
        return fresh + revived <= len(self._free)

    def hold(self, blocks: Iterable[int]) -> None:
        """Take a share in blocks that have content."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks; what they held is forgotten.

        Raises:
            OutOfBlocks: fewer are free; none was taken.
        """
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._refs[block] = 1
        return blocks

    def publish(self, block: int, key: BlockHash) -> None:
        """Let others find a held block by its content. Of two equal blocks the first stays known."""
        if self._hash_of[block] is None and key not in self._by_hash:
            self._hash_of[block] = key
            self._by_hash[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up a share. A sequence's last blocks are forgotten before its first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:  # nothing worth keeping: use it first
                    self._free.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """Forget what every block holds."""
        for block in range(self.num_blocks):
            self._forget(block)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that the books balance with the block tables of all holders."""
        held = [0] * self.num_blocks
        for table in holders:
            for block in table:
                held[block] += 1
        assert held == self._refs, "reference counts differ from block tables"
        assert set(self._free) == {block for block, count in enumerate(self._refs) if count == 0}, "free list differs"
        known = {block: key for block, key in enumerate(self._hash_of) if key is not None}
        assert known == {block: key for key, block in self._by_hash.items()}, "hash tables differ"

    def _forget(self, block: int) -> None:
        key = self._hash_of[block]
        if key is not None:
            del self._by_hash[key]
            self._hash_of[block] = None
