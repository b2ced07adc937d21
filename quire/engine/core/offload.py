"""Offload: copies blocks between the KV cache and a tier, between the steps of an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from quire.engine.client.protocol import StepStats
from quire.engine.execution.cache import KVCache
from quire.engine.scheduling.plan import StepPlan
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.tier_blocks import UnsavedBlocks
from quire.engine.tiers.worker import TierWorker


class TierObserver(Protocol):
    """Is told which blocks a tier has."""

    def tier_changed(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Note that blocks with these keys can be found in the tier, and that others cannot any more."""


logger = logging.getLogger(__name__)
_PER_STEP = 1 << 20  # bytes that are copied after a step, at least one block
_PATIENCE = 1.0  # seconds in which blocks are saved before their memory is freed, and are written then


class Offload:
    """Save computed blocks to a tier, and fill blocks with what was loaded from it.

    A block is saved after a step or while there is none, a few at a time; at the latest before a step overwrites it,
    unless too many others wait to be written. Nothing waits for the disk but the end of the engine.
    """

    def __init__(
        self, worker: TierWorker, unsaved: UnsavedBlocks, block_bytes: int, observer: TierObserver | None = None
    ) -> None:
        """`worker`: is closed by `close`. `observer`: None: nobody wants to know what the tier has."""
        self._observer = observer
        self._worker = worker
        self._unsaved = unsaved
        self._count = max(1, _PER_STEP // block_bytes)
        self._is_stopped = False

    @property
    def has_unsaved(self) -> bool:
        """Whether blocks are still to be saved."""
        return not self._is_stopped and len(self._unsaved) > 0

    @property
    def unwritten(self) -> int:
        """Blocks that are not written yet."""
        return (0 if self._is_stopped else len(self._unsaved)) + self._worker.unwritten

    def before_step(self, cache: KVCache) -> None:
        """Save the blocks that the next step may overwrite."""
        for block, key in self._unsaved.take_leaving():
            if self._worker.room > 0 and not self._is_stopped:
                self._worker.put(key, cache.read(block))

    def save(self, cache: KVCache) -> bool:
        """Save some of the blocks that were computed; returns whether more could be saved at once."""
        if self.has_unsaved:
            for block, key in self._unsaved.take(min(self._count, self._worker.room)):
                self._worker.put(key, cache.read(block))
        return self._worker.room > 0

    def receive(self, scheduler: Scheduler, cache: KVCache) -> None:
        """Fill blocks with what was loaded since the last call."""
        loads = scheduler.loads
        if loads is None:
            return
        for loaded in self._worker.take_loaded():
            block = loads.block(loaded.serial, loaded.index)
            if block is None:
                continue
            if loaded.data is None:
                loads.failed(loaded.serial)
            else:
                cache.write(block, loaded.data)
                loads.received(loaded.serial, loaded.index)

    def wait(self, seconds: float) -> None:
        """Wait for a block to be loaded, at most so long."""
        self._worker.wait_loaded(seconds)

    def measure(self, scheduler: Scheduler, plan: StepPlan, seconds: float) -> None:
        """Note how long a step has taken, in which most tokens were those of prompts."""
        if scheduler.loads is not None and scheduler.loads.rule is not None:
            scheduler.loads.rule.computed(sum(item.count for item in plan.scheduled if item.count > 1), seconds)

    def count(self, stats: StepStats) -> None:
        """Add what was read and written since the last call to the statistics of a step, and tell the observer."""
        traffic = self._worker.take_traffic()
        stats.tier_bytes, stats.unwritten_blocks = self._worker.nbytes, self.unwritten
        stats.loaded_bytes, stats.load_seconds = traffic.loaded_bytes, traffic.load_seconds
        stats.stored_bytes, stats.store_seconds = traffic.stored_bytes, traffic.store_seconds
        if self._observer is not None:
            self._observer.tier_changed(*self._worker.take_changes())

    def clear(self) -> None:
        """Forget all blocks of the tier."""
        self._worker.clear()

    def stop(self) -> None:
        """Neither save nor load any more, as the tier has blocks of other weights."""
        if not self._is_stopped:
            self._is_stopped = True
            logger.warning(
                "the weights were replaced: until the next start the prefix cache is in memory alone, without the "
                "blocks of --kv-offloading-path"
            )
            self._worker.stop()

    def forget(self, cache: KVCache) -> None:
        """Save what is not saved, within some seconds: the memory of the blocks is freed."""
        deadline = time.monotonic() + _PATIENCE
        while self.has_unsaved and self._worker.wait_room(deadline - time.monotonic()):
            self.save(cache)
        self._unsaved.cleared()

    def close(self, cache: KVCache | None) -> None:
        """Save what is not saved, within some seconds, and end."""
        if cache is not None:
            self.forget(cache)
        self._worker.close(_PATIENCE)
