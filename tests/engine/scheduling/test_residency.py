"""BlockResidency: how long blocks stay in the prefix cache, and how soon they are used again."""

from __future__ import annotations

import pytest

from quire.engine.client.protocol import BlockLife, StepStats
from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.residency import BlockResidency


class Clock:
    """A clock that stands still until a test moves it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def report(residency: BlockResidency) -> tuple[list[BlockLife], list[float]]:
    stats = StepStats()
    residency.report(stats)
    return stats.evicted_blocks, stats.block_reuse_gaps


def test_the_life_of_a_cached_block() -> None:
    clock = Clock()
    residency = BlockResidency(1.0, clock)
    pool = BlockPool(1, 4, residency)
    (block,) = pool.allocate(1)
    pool.cache_block(block, b"a")
    clock.now += 5
    pool.release([block])
    clock.now += 3
    pool.acquire(pool.match([b"a"]))
    clock.now += 2
    pool.release([block])
    assert report(residency) == ([], [3.0])
    clock.now += 7
    pool.allocate(1)
    assert report(residency) == ([BlockLife(lifetime=17.0, idle=7.0)], [])
    assert report(residency) == ([], [])


def test_blocks_without_cached_content_have_no_life() -> None:
    residency = BlockResidency(1.0)
    pool = BlockPool(1, 4, residency)
    for _ in range(3):
        pool.release(pool.allocate(1))
    assert report(residency) == ([], [])


def test_a_reset_of_the_prefix_cache_ends_the_life_of_all_blocks() -> None:
    clock = Clock()
    residency = BlockResidency(1.0, clock)
    pool = BlockPool(2, 4, residency)
    blocks = pool.allocate(2)
    for block in blocks:
        pool.cache_block(block, block.to_bytes(4))
    clock.now += 5
    pool.release(blocks[:1])
    clock.now += 3
    pool.evict_all()
    pool.check([blocks[1:]])
    assert report(residency)[0] == [BlockLife(lifetime=8.0, idle=3.0), BlockLife(lifetime=8.0, idle=8.0)]


@pytest.mark.parametrize("sample", [0.25, 1.0])
def test_a_share_of_all_blocks_is_watched(sample: float) -> None:
    residency = BlockResidency(sample)
    pool = BlockPool(1000, 4, residency)
    blocks = pool.allocate(1000)
    for block in blocks:
        pool.cache_block(block, block.to_bytes(4))
    pool.release(blocks)
    pool.allocate(1000)
    evicted, _ = report(residency)
    assert abs(len(evicted) - 1000 * sample) <= (150 if sample < 1 else 0)
