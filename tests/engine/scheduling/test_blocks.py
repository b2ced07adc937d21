"""BlockPool: allocation, reference counts, prefix cache and eviction."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.engine.scheduling.blocks import BlockPool, OutOfBlocks, hasher_named

BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """Holders that allocate, cache, share and release blocks at random."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, 4)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # what each block was last filled with

    @rule(count=st.integers(0, BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            assert self.pool.num_free == free
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not {block for holder in self.holders for block in holder} & set(blocks)
        for block in blocks:
            self.content.pop(block, None)
        self.holders.append(blocks)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def cache_block(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from([block for holder in self.holders for block in holder]))
        if block not in self.content:
            self.pool.cache_block(block, key)
            if self.pool.match([key]) == [block]:
                self.content[block] = key

    @rule(keys=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=4, unique=True))
    def share(self, keys: list[bytes]) -> None:
        blocks = self.pool.match(keys)
        assert [self.content[block] for block in blocks] == keys[: len(blocks)]
        if self.pool.can_take(blocks, 0):
            self.pool.acquire(blocks)
            self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(holder))

    @rule()
    def evict_all(self) -> None:
        self.pool.evict_blocks(range(BLOCKS))
        self.content.clear()

    @invariant()
    def pool_is_consistent(self) -> None:
        self.pool.check(self.holders)
        assert self.pool.num_used + self.pool.num_free == BLOCKS


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_least_recently_used_content_is_evicted_first() -> None:
    pool = BlockPool(3, 4)
    (a,), (b,), (c,) = pool.allocate(1), pool.allocate(1), pool.allocate(1)
    for block, key in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.cache_block(block, key)
    pool.release([b])
    pool.release([a])
    pool.release([c])
    pool.allocate(1)
    assert pool.match([b"b"]) == []
    assert pool.match([b"a"]) == [a]
    pool.allocate(1)
    assert pool.match([b"a"]) == []
    assert pool.match([b"c"]) == [c]


def test_the_last_blocks_of_a_sequence_are_evicted_first() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, (b"1", b"2", b"3"), strict=True):
        pool.cache_block(block, key)
    pool.release(blocks)
    pool.allocate(1)
    assert pool.match([b"1", b"2", b"3"]) == blocks[:2]


def test_blocks_without_cached_content_are_allocated_first() -> None:
    pool = BlockPool(2, 4)
    (cached,), (uncached,) = pool.allocate(1), pool.allocate(1)
    pool.cache_block(cached, b"x")
    pool.release([cached])
    pool.release([uncached])
    assert pool.allocate(1) == [uncached]
    assert pool.match([b"x"]) == [cached]


@pytest.mark.parametrize("name", ["sha256", "xxhash"])
def test_hashers_distinguish_contents(name: str) -> None:
    hasher = hasher_named(name)  # type: ignore[arg-type]
    assert hasher(b"one") == hasher(b"one")
    assert hasher(b"one") != hasher(b"two")
    assert len(hasher(b"one")) >= 16
