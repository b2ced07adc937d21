"""HostTier: blocks in the memory of the host, beside a device that has its own, and files behind it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from typing_extensions import override

from quire.engine.client.protocol import LoadSource, StepStats
from quire.engine.core.block_store import BlockStore, StoreChanges
from quire.engine.execution.cache import KVCache
from quire.engine.execution.host_blocks import BlockCopies, Copy
from quire.engine.execution.pinned import Event
from quire.engine.scheduling.block_loads import BlockLoads
from quire.engine.scheduling.tier_blocks import BlockTier, UnsavedBlock, UnsavedPlaces
from quire.engine.tiers.host_index import HostIndex
from quire.engine.tiers.published import PublishedBlocks
from quire.engine.tiers.worker import LoadedBlock, TierTraffic, TierWorker

logger = logging.getLogger(__name__)
_IN_FLIGHT = 64 << 20  # bytes that are being copied in each direction, at least two blocks
_PASSED_ON = 1 << 20  # bytes that are copied for the files at a time, at least one block
_REPLACED = "the weights were replaced: until the next start no blocks of --kv-offloading-path are read or written"


@dataclass(frozen=True, slots=True, eq=False)
class _Save:
    """Copies to rows that are under way."""

    event: Event
    began: float
    copies: list[Copy]
    keys: list[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class _Restore:
    """Copies to blocks of a load that are under way. `first`: index in the load of the first block."""

    event: Event
    began: float
    copies: list[Copy]
    serial: int
    first: int


_Copies = TypeVar("_Copies", _Save, _Restore)


@dataclass(slots=True, eq=False)
class _Load:
    """A request that waits for blocks.

    Attributes:
        next: index of the block that is copied next.
        awaited: those that the files are asked for and have not given, in this order.
        copying: blocks that are being copied.
        has_failed: no further block can be had.
    """

    keys: Sequence[bytes]
    awaited: deque[bytes]
    next: int = 0
    copying: int = 0
    has_failed: bool = False


@dataclass(slots=True)
class _Copied:
    """Sums of bytes and seconds of one direction."""

    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Moved:
    """What was copied since the last statistics."""

    saved: _Copied = field(default_factory=_Copied)
    restored: _Copied = field(default_factory=_Copied)


class HostTier(BlockTier, BlockStore):
    """A bounded number of blocks in host memory, those used most recently, and a disk behind them if there is one.

    Blocks are copied beside the steps. The device lets a step wait for a copy only if the step overwrites a block that
    is being copied, or is computed in blocks that an aborted request was to read into.

    What leaves this memory is written to files before, if these have room. What files have comes through this memory.
    """

    def __init__(
        self,
        copies: BlockCopies,
        rows: int,
        block_bytes: int,
        disk: TierWorker | None = None,
        *,
        tracks_changes: bool = False,
    ) -> None:
        """Make a tier without blocks.

        Args:
            copies: has the memory; closed by `close`.
            rows: blocks that it has room for.
            block_bytes: bytes of a block.
            disk: keeps what leaves the memory; closed by `close`. None: it is lost.
            tracks_changes: `take_changes` is called regularly; else changes are not collected.
        """
        self.outlives_engine = disk is not None
        self._copies = copies
        self._block_bytes = block_bytes
        self._most = max(2, _IN_FLIGHT // block_bytes)
        self._passed_on = max(1, _PASSED_ON // block_bytes)
        self._disk = disk
        self._index = HostIndex(rows)
        self._unwritten = None if disk is None else UnsavedPlaces(disk)  # rows
        self._saves: deque[_Save] = deque()
        self._restores: deque[_Restore] = deque()
        self._loads: dict[int, _Load] = {}
        self._arrived: deque[LoadedBlock] = deque()  # from files, for which there was no row
        self._abandoned = False  # a restore is under way that nobody waits for any more
        self._published = PublishedBlocks() if tracks_changes else None
        self._moved = _Moved()

    # What the scheduler asks.

    @override
    def has(self, key: bytes) -> bool:
        return self._index.row(key) is not None or (self._disk is not None and self._disk.has(key))

    @override
    def slowest(self, keys: Sequence[bytes]) -> LoadSource:
        return "host" if all(self._index.row(key) is not None for key in keys) else "disk"

    @override
    def load(self, serial: int, keys: Sequence[bytes]) -> None:
        awaited = [key for key in keys if self._index.row(key) is None]
        self._index.touch(reversed(keys))  # the first ones last: the others are found behind them only
        self._loads[serial] = _Load(keys, deque(awaited))
        if awaited and self._disk is not None:
            self._disk.load(serial, awaited)

    @override
    def cancel(self, serial: int) -> None:
        load = self._loads.pop(serial, None)
        if load is not None and load.copying:
            self._abandoned = True
        if self._disk is not None:
            self._disk.cancel(serial)

    @override
    def touch(self, keys: Sequence[bytes]) -> None:
        self._index.touch(keys)
        if self._disk is not None and (on_disk := [key for key in keys if self._disk.has(key)]):
            self._disk.touch(on_disk)

    @override
    def evict(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        for key in keys:
            self._forget_row(key)
        if self._disk is not None:
            self._disk.evict(keys)

    @override
    def in_memory(self, key: bytes) -> None:
        if self._published is not None and self._index.row(key) is not None:
            self._published.stored(key)
        if self._disk is not None and self._disk.has(key):
            self._disk.in_memory(key)

    @override
    def subscribers_forgot(self) -> None:
        if self._published is not None:
            self._published.forget()
        if self._disk is not None:
            self._disk.subscribers_forgot()

    # What the core does.

    @property
    @override
    def is_stopped(self) -> bool:
        return False

    @property
    @override
    def room(self) -> int:
        return self._most - sum(len(save.copies) for save in self._saves)

    @property
    @override
    def unwritten(self) -> int:
        waiting = sum(len(save.copies) for save in self._saves)
        if self._disk is None or self._unwritten is None:
            return waiting
        return waiting + (0 if self._disk.is_stopped else len(self._unwritten)) + self._disk.unwritten

    @override
    def save(self, blocks: Sequence[UnsavedBlock], cache: KVCache) -> None:
        copies, keys = list[Copy](), list[bytes]()
        for block, key in blocks:
            if self._index.row(key) is None and (row := self._take_row(key)) is not None:
                self._index.use(row)
                copies.append(Copy(block, row))
                keys.append(key)
        if copies:
            self._saves.append(_Save(self._copies.save(cache, copies), time.monotonic(), copies, keys))

    @override
    def before_step(self, removed: set[int] | None) -> None:
        """Let the step wait for the last copy of a block that it may overwrite: copies are made in their order."""
        written = self._saves if removed is None else [save for save in self._saves if _concerns(save, removed)]
        left = [restore for restore in self._restores if restore.serial not in self._loads] if self._abandoned else []
        for concerned in (written, left):
            if concerned:
                self._copies.hold_steps(concerned[-1].event)
        self._abandoned = False

    @override
    def advance(self) -> bool:
        self._end_saves()
        if self._disk is None or self._unwritten is None or not self._unwritten:
            return False
        for row, key in self._unwritten.take(min(self._passed_on, self._disk.room)):
            self._disk.put(key, self._copies.read(row))
        return self._disk.room > 0 and len(self._unwritten) > 0

    @override
    def receive(self, loads: BlockLoads, cache: KVCache) -> None:
        self._end_saves()
        self._end_restores(loads)
        self._take_arrived()
        for serial, load in [*self._loads.items()]:
            self._restore(serial, load, loads, cache)
        self._end_restores(loads)

    @override
    def wait(self, seconds: float) -> None:
        if self._restores:
            self._restores[0].event.synchronize()  # at most `_IN_FLIGHT` bytes, which take milliseconds
        elif self._disk is not None and any(load.awaited for load in self._loads.values()):
            self._disk.wait_loaded(seconds)

    @override
    def wait_room(self, seconds: float) -> bool:
        if self._saves and self.room <= 0:
            self._saves[0].event.synchronize()
            self._end_saves()
        return seconds > 0 and self.room > 0

    @override
    def count(self, stats: StepStats) -> None:
        self._end_saves()
        moved, self._moved = self._moved, _Moved()
        stats.host_usage = self._index.usage
        stats.loaded_bytes, stats.load_seconds = moved.restored.nbytes, moved.restored.seconds
        stats.stored_bytes, stats.store_seconds = moved.saved.nbytes, moved.saved.seconds
        if self._disk is not None:
            traffic: TierTraffic = self._disk.take_traffic()
            stats.tier_bytes = self._disk.nbytes
            stats.file_read_bytes, stats.file_read_seconds = traffic.loaded_bytes, traffic.load_seconds
            stats.file_written_bytes, stats.file_write_seconds = traffic.stored_bytes, traffic.store_seconds

    @override
    def take_changes(self) -> list[StoreChanges]:
        changes = [] if self._published is None else [StoreChanges("host", self._published.take())]
        return changes if self._disk is None else [*changes, StoreChanges("disk", self._disk.take_changes())]

    @override
    def clear(self) -> None:
        self._forget_rows()
        if self._disk is not None:
            self._disk.clear()

    @override
    def weights_replaced(self) -> None:
        """Go on with an empty memory; files are those of other weights."""
        self._forget_rows()
        if self._disk is not None and not self._disk.is_stopped:
            logger.warning(_REPLACED)
            self._disk.stop()

    @override
    def settle(self) -> None:
        for save in self._saves:
            save.event.synchronize()
        self._end_saves()
        for restore in self._restores:
            restore.event.synchronize()
            self._end_uses(restore.copies)
        self._restores.clear()

    @override
    def close(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        if self._disk is not None:
            while self._unwritten and self._disk.wait_room(deadline - time.monotonic()):
                self.advance()
            self._disk.close(max(0.0, deadline - time.monotonic()))
        self._copies.close()

    @override
    def check(self) -> None:
        """Assert that rows are not lost, and in use only by copies that are under way."""
        self._index.check()
        under_way = [len(save.copies) for save in self._saves] + [len(restore.copies) for restore in self._restores]
        assert self._index.uses == sum(under_way), "a row is in use by no copy"

    # Rows.

    def _take_row(self, key: bytes) -> int | None:
        """Give a block a row, and have the files keep what was there if they have room; None: all rows are in use."""
        place = self._index.take(key)
        if place is None:
            return None
        if place.lost is not None:
            unwritten = self._row_lost(place.row, place.lost.key)
            if unwritten is not None and self._disk is not None and self._disk.room > 0:
                self._disk.put(unwritten, self._copies.read(place.row))
        return place.row

    def _row_lost(self, row: int, key: bytes) -> bytes | None:
        """Note that a row does not have its block any more; returns its key if the files lack it."""
        if self._published is not None:
            self._published.removed(key)
        return None if self._unwritten is None else self._unwritten.pop(row)

    def _row_filled(self, row: int, key: bytes) -> None:
        """Note that a row has all bytes of its block."""
        if self._published is not None:
            self._published.stored(key)
        if self._unwritten is not None:
            self._unwritten.add(row, key)

    def _forget_rows(self) -> None:
        for key in self._index.known():
            self._forget_row(key)

    def _forget_row(self, key: bytes) -> None:
        if (row := self._index.forget(key)) is not None:
            self._row_lost(row, key)

    def _end_uses(self, copies: Iterable[Copy]) -> None:
        for _, row in copies:
            self._index.end_use(row)

    # Copies.

    def _end_saves(self) -> None:
        now = time.monotonic()
        for save in _reached(self._saves):
            _add(self._moved.saved, len(save.copies) * self._block_bytes, now - save.began)
            self._end_uses(save.copies)
            for (_, row), key in zip(save.copies, save.keys, strict=True):
                if self._index.row(key) == row:  # else it was forgotten meanwhile
                    self._row_filled(row, key)

    def _end_restores(self, loads: BlockLoads) -> None:
        now = time.monotonic()
        for restore in _reached(self._restores):
            _add(self._moved.restored, len(restore.copies) * self._block_bytes, now - restore.began)
            self._end_uses(restore.copies)
            load = self._loads.get(restore.serial)
            if load is None:
                continue
            load.copying -= len(restore.copies)
            for index in range(restore.first, restore.first + len(restore.copies)):
                loads.received(restore.serial, index)
            if load.next == len(load.keys) and not load.copying:
                del self._loads[restore.serial]

    def _take_arrived(self) -> None:
        """Put what was read from files into rows, and have no more of it wait than there are rows."""
        if self._disk is None:
            return
        self._arrived += self._disk.take_loaded()
        while self._arrived:
            arrived = self._arrived[0]
            load = self._loads.get(arrived.serial)
            if load is not None and arrived.data is not None and self._index.row(load.awaited[0]) is None:
                row = self._take_row(load.awaited[0])
                if row is None:
                    return
                self._copies.fill(row, arrived.data)
                self._row_filled(row, load.awaited[0])
            self._arrived.popleft()
            if load is not None:
                load.has_failed = load.has_failed or arrived.data is None
                load.awaited.popleft()

    def _restore(self, serial: int, load: _Load, loads: BlockLoads, cache: KVCache) -> None:
        """Begin to copy the blocks of a load that are in memory, up to the first that is not."""
        copies, first = list[Copy](), load.next
        room = self._most - sum(len(restore.copies) for restore in self._restores)
        while load.next < len(load.keys) and len(copies) < room:
            key = load.keys[load.next]
            row, block = self._index.row(key), loads.block(serial, load.next)
            assert block is not None, "a load goes on that was cancelled"
            if row is None:
                load.has_failed = load.has_failed or key not in load.awaited
                break
            self._index.use(row)
            copies.append(Copy(block, row))
            load.next += 1
        if copies:
            event = self._copies.restore(cache, copies)
            load.copying += len(copies)
            self._restores.append(_Restore(event, time.monotonic(), copies, serial, first))
        elif load.has_failed and not load.copying:
            del self._loads[serial]
            if self._disk is not None:
                self._disk.cancel(serial)
            loads.failed(serial)


def _reached(copies: deque[_Copies]) -> Iterator[_Copies]:
    """Remove the copies that were made, the oldest first."""
    while copies and copies[0].event.query():
        yield copies.popleft()


def _concerns(save: _Save, blocks: set[int]) -> bool:
    return any(block in blocks for block, _ in save.copies)


def _add(sums: _Copied, nbytes: int, seconds: float) -> None:
    sums.nbytes += nbytes
    sums.seconds += seconds
