"""BlockResidency: how long KV blocks stay in the prefix cache, and how soon they are used again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.client.protocol import BlockLife, StepStats


@dataclass(slots=True)
class _Sampled:
    """A block that is watched.

    Attributes:
        allocated: when its content began, in monotonic seconds.
        used: when a request last had it.
    """

    allocated: float
    used: float


class BlockResidency:
    """Watch a share of all blocks from their allocation until their content is evicted."""

    def __init__(self, sample: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`sample`: the share of allocations after which the block is watched, above 0 to 1."""
        self._sample = sample
        self._clock = clock
        self._random = random.Random()
        self._blocks: dict[int, _Sampled] = {}  # at most all blocks
        self._evicted: list[BlockLife] = []
        self._gaps: list[float] = []

    def allocated(self, block: int) -> None:
        """Note that a block gets new content."""
        if self._random.random() < self._sample:
            now = self._clock()
            self._blocks[block] = _Sampled(now, now)
        else:
            self._blocks.pop(block, None)

    def reused(self, block: int) -> None:
        """Note that a request has found the content of a block."""
        if (sampled := self._blocks.get(block)) is not None:
            now = self._clock()
            self._gaps.append(now - sampled.used)
            sampled.used = now

    def released(self, block: int) -> None:
        """Note that no request has a block any more."""
        if (sampled := self._blocks.get(block)) is not None:
            sampled.used = self._clock()

    def evicted(self, block: int) -> None:
        """Note that the cached content of a block is lost."""
        if (sampled := self._blocks.pop(block, None)) is not None:
            now = self._clock()
            self._evicted.append(BlockLife(now - sampled.allocated, now - sampled.used))

    def report(self, stats: StepStats) -> None:
        """Put what was noted since the last report into the statistics of a step."""
        stats.evicted_blocks, self._evicted = self._evicted, []
        stats.block_reuse_gaps, self._gaps = self._gaps, []
