"""TierWorker: a thread that reads and writes the blocks of a tier, so that steps wait for neither."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import Buffer

from quire.engine.client.protocol import LoadSource
from quire.engine.tiers.published import PublishedBlocks, TierChanges
from quire.engine.tiers.tier import Tier

logger = logging.getLogger(__name__)
_REFRESH_AFTER = 10.0  # seconds without work
# Bounds of what waits for a disk that may not answer for long:
_MOST_TOUCHES = 256  # notes of used blocks
_MOST_EVICTIONS = 1 << 14  # blocks that are to be forgotten; where there are more, all blocks are


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """A block that was read for a load.

    Attributes:
        serial: of the load.
        index: of the block in it.
        data: its bytes; None: it is not there any more, and no further block of the load follows.
    """

    serial: int
    index: int
    data: bytes | None


@dataclass(slots=True)
class TierTraffic:
    """What a worker has read and written: bytes and seconds."""

    loaded_bytes: int = 0
    load_seconds: float = 0.0
    stored_bytes: int = 0
    store_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Load:
    serial: int
    keys: Sequence[bytes]
    is_cancelled: bool = False


class TierWorker:
    """Run the methods of a tier one after the other in a thread: loads first, then what is to be kept.

    What waits to be kept has a bound in bytes, and so has what was loaded and not taken.
    """

    def __init__(self, tier: Tier, block_bytes: int, queue_bytes: int, *, tracks_changes: bool = False) -> None:
        """Start the thread.

        Args:
            tier: closed by `close`.
            block_bytes: bytes of each block.
            queue_bytes: bytes of the blocks that wait to be written, and as many of those that were read.
            tracks_changes: `take_changes` is called regularly; else changes are not collected.
        """
        self._tier = tier
        self._most = max(2, queue_bytes // block_bytes)  # blocks
        self._puts: deque[tuple[bytes, Buffer]] = deque()
        self._loads: deque[_Load] = deque()
        self._touches: deque[Sequence[bytes]] = deque()
        self._evictions: set[bytes] = set()  # blocks that are to be forgotten, and count as forgotten
        self._is_clearing = False  # all blocks are to be forgotten, and count as forgotten
        self._loaded: deque[LoadedBlock] = deque()
        self._current: _Load | None = None
        self._traffic = TierTraffic()
        self._published = PublishedBlocks() if tracks_changes else None
        self._nbytes = tier.nbytes
        self._closes_at: float | None = None
        self._is_stopped = False
        self._is_writing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="quire-kv-tier", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """The bytes that the tier takes, as the thread has seen it last: to look may take as long as the disk does."""
        return self._nbytes

    @property
    def is_stopped(self) -> bool:
        """Whether there are no blocks any more, and none are taken."""
        return self._is_stopped

    @property
    def room(self) -> int:
        """Blocks that `put` still takes."""
        return 0 if self._is_stopped else self._most - len(self._puts)

    @property
    def unwritten(self) -> int:
        """Blocks that were put and are not written yet."""
        return len(self._puts) + self._is_writing

    def has(self, key: bytes) -> bool:
        """Return whether a block is probably in the tier."""
        if self._is_stopped or self._is_clearing or key in self._evictions:
            return False
        return self._tier.has(key)

    def slowest(self, keys: Sequence[bytes]) -> LoadSource:
        """Return where blocks are read from."""
        return "disk"

    def put(self, key: bytes, data: Buffer) -> bool:
        """Keep a block, which nobody changes afterwards; False: too many wait already, and it is not kept."""
        with self._changed:
            if self.room <= 0:
                return False
            self._puts.append((key, data))
            self._changed.notify_all()
        return True

    def load(self, serial: int, keys: Sequence[bytes]) -> None:
        """Read blocks, which `take_loaded` returns in this order."""
        with self._changed:
            self._loads.append(_Load(serial, keys))
            self._changed.notify_all()

    def cancel(self, serial: int) -> None:
        """Read no more blocks of a load; some may be returned yet."""
        with self._changed:
            self._loads = deque(load for load in self._loads if load.serial != serial)
            if self._current is not None and self._current.serial == serial:
                self._current.is_cancelled = True
            self._changed.notify_all()

    def take_loaded(self) -> list[LoadedBlock]:
        """Return the blocks that were read since the last call."""
        if not self._loaded:
            return []
        with self._changed:
            loaded, self._loaded = list(self._loaded), deque()
            self._changed.notify_all()
        return loaded

    def wait_loaded(self, seconds: float) -> None:
        """Wait until a block was read, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._loaded, timeout=seconds)

    def wait_room(self, seconds: float) -> bool:
        """Wait until `put` takes a block, at most so long; returns whether it does."""
        with self._changed:
            return self._changed.wait_for(lambda: self.room > 0, timeout=max(0.0, seconds))

    def stop(self) -> None:
        """Have no blocks and take none from now on."""
        self._is_stopped = True

    def take_traffic(self) -> TierTraffic:
        """Return what was read and written since the last call."""
        with self._changed:
            traffic, self._traffic = self._traffic, TierTraffic()
        return traffic

    def in_memory(self, key: bytes) -> None:
        """Note that a block of the tier is in memory, too. Whoever follows the prefix cache knows its tokens now."""
        if self._published is not None:
            with self._changed:
                self._published.stored(key)

    def subscribers_forgot(self) -> None:
        """Note that those who follow the prefix cache have forgotten all."""
        if self._published is not None:
            with self._changed:
                self._published.forget()

    def take_changes(self) -> TierChanges:
        """Return which blocks were stored and removed since the last call; none if they are not collected."""
        if self._published is None:
            return TierChanges([], [])
        with self._changed:
            return self._published.take()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that blocks were used, unless the thread has much to do."""
        with self._changed:
            if len(self._touches) < _MOST_TOUCHES:
                self._touches.append(keys)
                self._changed.notify_all()

    def evict(self, keys: Iterable[bytes]) -> None:
        """Forget blocks, those that wait to be kept included. From now on nobody finds them."""
        evicted = frozenset(keys)
        with self._changed:
            self._puts = deque(put for put in self._puts if put[0] not in evicted)
            self._evictions |= evicted
            if len(self._evictions) > _MOST_EVICTIONS:
                self._clear()
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget all blocks. From now on nobody finds them."""
        with self._changed:
            self._clear()
            self._changed.notify_all()

    def _clear(self) -> None:
        self._puts.clear()
        self._evictions.clear()
        self._is_clearing = True

    def close(self, patience: float) -> None:
        """End the thread once it has kept what waits, or after so many seconds, and close the tier."""
        with self._changed:
            self._loads.clear()
            self._closes_at = time.monotonic() + patience
            self._changed.notify_all()
        self._thread.join(patience + 1)
        if self._thread.is_alive():
            logger.warning("blocks of the prefix cache are still being written, and are left as they are")
        else:
            self._tier.close()

    def _run(self) -> None:
        try:
            self._work()
        except Exception:  # the edge of the thread: the engine goes on without the tier
            logger.exception("blocks of the prefix cache are kept in memory alone from now on")
            with self._changed:
                self._is_stopped, self._is_writing = True, False
                self._puts.clear()
                self._loads.clear()
                if self._published is not None:
                    self._published.lost_all()
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            action = self._next()
            if action is None:
                return
            action()
            self._nbytes, removed = self._tier.nbytes, self._tier.take_removed()
            if self._published is not None:
                with self._changed:
                    for key in removed:
                        self._published.removed(key)

    def _next(self) -> Callable[[], None] | None:
        """Wait for something to do; None: the worker is closed."""
        with self._changed:
            has_work = self._changed.wait_for(self._has_work, timeout=_REFRESH_AFTER)
            if self._closes_at is not None and (not self._must_finish or time.monotonic() > self._closes_at):
                return None
            if not has_work:
                return self._tier.refresh
            if self._loads:
                self._current = self._loads.popleft()
                return partial(self._load, self._current)
            if self._is_clearing:
                return self._clear_tier
            if self._evictions:
                return partial(self._evict, frozenset(self._evictions))
            if self._touches:
                return partial(self._tier.touch, self._touches.popleft())
            self._is_writing = True
            self._changed.notify_all()  # there is room for a block
            return partial(self._put, *self._puts.popleft())

    @property
    def _must_finish(self) -> bool:
        """Whether something waits that is done before the end: what is forgotten must not be there after a restart."""
        return bool(self._is_clearing or self._evictions or self._puts)

    def _has_work(self) -> bool:
        return bool(self._loads or self._touches) or self._must_finish or self._closes_at is not None

    def _clear_tier(self) -> None:
        self._tier.clear()
        with self._changed:
            self._is_clearing = False

    def _evict(self, keys: frozenset[bytes]) -> None:
        self._tier.evict(keys)
        with self._changed:
            self._evictions -= keys

    def _load(self, load: _Load) -> None:
        for index, key in enumerate(load.keys):
            started = time.monotonic()
            data = self._tier.get(key)
            seconds = time.monotonic() - started
            with self._changed:
                self._changed.wait_for(lambda: len(self._loaded) < self._most or self._is_over(load))
                if self._is_over(load):
                    return
                self._loaded.append(LoadedBlock(load.serial, index, data))
                self._changed.notify_all()
                if data is None:
                    return
                self._traffic.loaded_bytes += len(data)
                self._traffic.load_seconds += seconds
        self._tier.touch(reversed(load.keys))  # the first ones last: the others are found behind them only

    def _is_over(self, load: _Load) -> bool:
        return load.is_cancelled or self._closes_at is not None

    def _put(self, key: bytes, data: Buffer) -> None:
        started = time.monotonic()
        is_kept = self._tier.put(key, data)
        with self._changed:
            self._is_writing = False
            if is_kept:
                if self._published is not None:
                    self._published.stored(key)
                self._traffic.stored_bytes += memoryview(data).nbytes
                self._traffic.store_seconds += time.monotonic() - started
