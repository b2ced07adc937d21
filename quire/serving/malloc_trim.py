"""Memory that requests have left: trims of the C library's heap, and how often Python searches for garbage."""

from __future__ import annotations

import asyncio
import gc
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.allocator import return_freed_memory

_ENOUGH = 16 << 20  # bytes of large bodies, after which the heap is trimmed also while requests run
_LARGE = 1 << 20  # bytes of a body
_GROWN = 32 << 20  # bytes by which the process must have grown, for the heap to be trimmed while nothing runs
_INTERVAL = 10.0  # seconds
_LONG = 0.02  # seconds of a full collection, which is then put off
_MUCH = 1 << 30  # bytes by which the process must have grown for it to take place anyway
_NEVER = 1 << 30  # collections of younger objects before a full one
_FEW = 100_000  # objects from which on their number tells how long a collection takes
_PACE = 1e-7  # seconds for each object, until a collection has been measured
_STATM = Path("/proc/self/statm")


class MallocTrimmer:
    """Trim glibc's heap, which is configured to keep freed memory, so that a prefill does not wait for page faults.

    It is trimmed when a server has started, as reading a tokenizer frees more than it keeps, after large bodies, and
    after all requests have ended. Ordinary requests never make it trim while others run.

    Python searches all objects for garbage whenever their number has grown by a quarter. With 5,000 connections that
    took 60 ms, in which the event loop waited, and happened again and again while they came. In `rationed_collections`
    there is a full collection only between two waits of `trim_regularly`, if it will be short: the time for each object
    is known from the last one. So it takes place before thousands of clients come, or after they have left, unless
    the process grows meanwhile. Requests leave no cycles, and young objects are searched as always.
    """

    def __init__(self) -> None:
        self._received = 0  # bytes of large bodies since the last trim
        self._large_since_idle = False
        self._resident = _resident_bytes()  # after the last trim
        self._thresholds = gc.get_threshold()
        self._frozen = sys.getallocatedblocks()  # small objects that are not searched, such as those of modules
        self._pace = _PACE
        self._collected = self._resident  # resident bytes after the last full collection

    def received(self, size: int) -> None:
        """Count the bytes of a body."""
        if size >= _LARGE:
            self._received += size
            self._large_since_idle = True

    async def trim_regularly(self, idle: Callable[[], bool], interval: float = _INTERVAL) -> None:
        """Trim now, and again where that is worth it; never returns. `idle`: whether no request is being answered."""
        await self._trim()
        while True:
            await asyncio.sleep(interval)
            if is_idle := idle():
                worth = self._large_since_idle or _resident_bytes() > self._resident + _GROWN
                self._large_since_idle = False
            else:
                worth = self._received >= _ENOUGH
            if (worth and is_idle) or gc.get_count()[-1] >= self._thresholds[-1]:
                self._collect()
            if worth:
                await self._trim()

    @contextmanager
    def rationed_collections(self) -> Iterator[None]:
        """Leave full collections to `trim_regularly`, inside of `with`. To be entered after `gc.freeze`."""
        self._frozen = sys.getallocatedblocks()
        self._collected = _resident_bytes()
        gc.set_threshold(*self._thresholds[:-1], _NEVER)
        try:
            yield
        finally:
            gc.set_threshold(*self._thresholds)

    async def _trim(self) -> None:
        self._received = 0
        await asyncio.to_thread(return_freed_memory)
        self._resident = _resident_bytes()

    def _collect(self) -> None:
        """Search all objects for garbage, unless that takes long and there is memory to wait for a better time."""
        objects = max(sys.getallocatedblocks() - self._frozen, _FEW)
        if objects * self._pace > _LONG and _resident_bytes() <= self._collected + _MUCH:
            return
        began = time.thread_time()
        gc.collect()
        self._pace = (time.thread_time() - began) / objects
        self._collected = _resident_bytes()


def _resident_bytes() -> int:
    """Memory of this process that is resident; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
