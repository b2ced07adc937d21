"""BlockStore: what takes blocks of the KV cache and gives them back. DiskStore: files alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from typing_extensions import override

from quire.engine.client.protocol import LoadSource, StepStats
from quire.engine.execution.cache import KVCache
from quire.engine.scheduling.block_loads import BlockLoads
from quire.engine.scheduling.tier_blocks import UnsavedBlock
from quire.engine.tiers.published import TierChanges
from quire.engine.tiers.worker import TierWorker

logger = logging.getLogger(__name__)
_REPLACED = (
    "the weights were replaced: until the next start the prefix cache is in memory alone, without the blocks of "
    "--kv-offloading-path"
)


class StoreChanges(NamedTuple):
    """What has changed in a tier."""

    source: LoadSource
    changes: TierChanges


class BlockStore(Protocol):
    """The tiers behind a KV cache, for the core. Nothing waits for them but the methods that say so.

    Attributes:
        outlives_engine: what it keeps is there after a restart.
    """

    outlives_engine: bool

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is kept any more."""

    @property
    def room(self) -> int:
        """Blocks that `save` takes now."""

    @property
    def unwritten(self) -> int:
        """Blocks that the last tier does not have yet."""

    def save(self, blocks: Sequence[UnsavedBlock], cache: KVCache) -> None:
        """Keep blocks, no more than there is room for."""

    def before_step(self, removed: set[int] | None) -> None:
        """Make sure that the next step may overwrite some blocks; None: any."""

    def advance(self) -> bool:
        """Pass some blocks on, to the next tier; returns whether more could be passed on at once."""

    def receive(self, loads: BlockLoads, cache: KVCache) -> None:
        """Fill blocks that requests wait for."""

    def wait(self, seconds: float) -> None:
        """Wait for a block that a request waits for, at most so long."""

    def wait_room(self, seconds: float) -> bool:
        """Wait until `save` takes a block, at most so long; returns whether it does."""

    def count(self, stats: StepStats) -> None:
        """Add what was read and written since the last call to the statistics of a step."""

    def take_changes(self) -> list[StoreChanges]:
        """Return which blocks were stored and removed since the last call."""

    def clear(self) -> None:
        """Forget all blocks."""

    def weights_replaced(self) -> None:
        """Have no blocks of the weights before."""

    def settle(self) -> None:
        """Wait until no block of the KV cache is being copied: its memory is freed."""

    def check(self) -> None:
        """Assert that it is consistent."""

    def close(self, patience: float) -> None:
        """End; blocks that wait to be written are written within so many seconds."""


class DiskStore(BlockStore):
    """Files, which a thread reads and writes. Blocks are copied at once."""

    outlives_engine = True

    def __init__(self, worker: TierWorker) -> None:
        """`worker`: is closed by `close`."""
        self._worker = worker

    @property
    @override
    def is_stopped(self) -> bool:
        return self._worker.is_stopped

    @property
    @override
    def room(self) -> int:
        return self._worker.room

    @property
    @override
    def unwritten(self) -> int:
        return self._worker.unwritten

    @override
    def save(self, blocks: Sequence[UnsavedBlock], cache: KVCache) -> None:
        for block, key in blocks:
            self._worker.put(key, cache.read(block))

    @override
    def before_step(self, removed: set[int] | None) -> None:
        pass

    @override
    def advance(self) -> bool:
        return False

    @override
    def receive(self, loads: BlockLoads, cache: KVCache) -> None:
        for loaded in self._worker.take_loaded():
            block = loads.block(loaded.serial, loaded.index)
            if block is None:
                continue
            if loaded.data is None:
                loads.failed(loaded.serial)
            else:
                cache.write(block, loaded.data)
                loads.received(loaded.serial, loaded.index)

    @override
    def wait(self, seconds: float) -> None:
        self._worker.wait_loaded(seconds)

    @override
    def wait_room(self, seconds: float) -> bool:
        return self._worker.wait_room(seconds)

    @override
    def count(self, stats: StepStats) -> None:
        traffic = self._worker.take_traffic()
        stats.tier_bytes = self._worker.nbytes
        stats.loaded_bytes, stats.load_seconds = traffic.loaded_bytes, traffic.load_seconds
        stats.stored_bytes, stats.store_seconds = traffic.stored_bytes, traffic.store_seconds

    @override
    def take_changes(self) -> list[StoreChanges]:
        return [StoreChanges("disk", self._worker.take_changes())]

    @override
    def clear(self) -> None:
        self._worker.clear()

    @override
    def weights_replaced(self) -> None:
        if not self._worker.is_stopped:
            logger.warning(_REPLACED)
            self._worker.stop()

    @override
    def settle(self) -> None:
        pass

    @override
    def check(self) -> None:
        pass

    @override
    def close(self, patience: float) -> None:
        self._worker.close(patience)
