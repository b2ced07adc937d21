"""Offload: saves blocks of the KV cache to the tiers behind it, and fills others from there, between steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from quire.engine.client.protocol import LoadSource, StepStats
from quire.engine.core.block_store import BlockStore
from quire.engine.execution.cache import KVCache
from quire.engine.scheduling.plan import StepPlan
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.tier_blocks import UnsavedBlocks


class TierObserver(Protocol):
    """Is told which blocks a tier has."""

    def tier_changed(self, source: LoadSource, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Note that blocks with these keys can be found in a tier, and that others cannot any more."""


_PATIENCE = 1.0  # seconds in which blocks are saved before their memory is freed, and are written then


class Offload:
    """Save computed blocks to a store, and fill blocks with what was loaded from it.

    A block is saved after a step or while there is none, a few at a time; at the latest before a step overwrites it,
    unless too many others wait to be written. Nothing waits for the store but the end of the engine.
    """

    def __init__(
        self,
        store: BlockStore,
        unsaved: UnsavedBlocks,
        block_bytes: int,
        observer: TierObserver | None,
        per_step: int,
    ) -> None:
        """Assemble it.

        Args:
            store: is closed by `close`.
            unsaved: knows what the store lacks.
            block_bytes: bytes of a block.
            observer: None: nobody wants to know what the tiers have.
            per_step: bytes that are saved after a step.
        """
        self._observer = observer
        self._store = store
        self._unsaved = unsaved
        self._count = max(1, per_step // block_bytes)

    @property
    def unwritten(self) -> int:
        """Blocks that the last tier does not have yet."""
        return 0 if self._store.is_stopped else len(self._unsaved) + self._store.unwritten

    def before_step(self, cache: KVCache) -> None:
        """Save the blocks that the next step may overwrite."""
        if leaving := self._unsaved.take_leaving():
            self._store.save(leaving[: max(0, self._store.room)], cache)
        self._store.before_step(self._unsaved.take_removed())

    def save(self, cache: KVCache | None) -> bool:
        """Save some of the blocks that were computed; returns whether more could be saved at once.

        `cache`: None: its memory was freed.
        """
        if cache is not None and (blocks := self._unsaved.take(min(self._count, self._store.room))):
            self._store.save(blocks, cache)
        has_more = self._store.advance()
        return has_more or (cache is not None and len(self._unsaved) > 0 and self._store.room > 0)

    def receive(self, scheduler: Scheduler, cache: KVCache) -> None:
        """Fill blocks with what was loaded since the last call."""
        if scheduler.loads is not None:
            self._store.receive(scheduler.loads, cache)

    def wait(self, seconds: float) -> None:
        """Wait for a block to be loaded, at most so long."""
        self._store.wait(seconds)

    def measure(self, scheduler: Scheduler, plan: StepPlan, seconds: float) -> None:
        """Note how long a step has taken, in which most tokens were those of prompts."""
        if scheduler.loads is not None and scheduler.loads.rule is not None:
            scheduler.loads.rule.computed(sum(item.count for item in plan.scheduled if item.count > 1), seconds)

    def count(self, stats: StepStats) -> None:
        """Add what was read and written since the last call to the statistics of a step, and tell the observer."""
        self._store.count(stats)
        stats.unwritten_blocks = self.unwritten
        if self._observer is not None:
            for source, changes in self._store.take_changes():
                self._observer.tier_changed(source, *changes)

    def clear(self) -> None:
        """Forget all blocks of the tiers."""
        self._store.clear()

    def weights_replaced(self) -> None:
        """Have no blocks of the weights before."""
        self._unsaved.cleared()
        self._store.weights_replaced()

    def forget(self, cache: KVCache) -> None:
        """Save what is not saved, within some seconds: the memory of the blocks is freed."""
        deadline = time.monotonic() + _PATIENCE
        while len(self._unsaved) and self._store.wait_room(deadline - time.monotonic()):
            self.save(cache)
        self._store.settle()
        self._unsaved.cleared()

    def check(self) -> None:
        """Assert that the store is consistent."""
        self._store.check()

    def close(self, cache: KVCache | None) -> None:
        """Save what is not saved, within some seconds, if it is there after the end; and end."""
        if cache is not None and self._store.outlives_engine:
            self.forget(cache)
        self._store.settle()
        self._store.close(_PATIENCE)
