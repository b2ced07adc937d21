"""Memory that requests have left: trims of the C library's heap, and how often Python searches for garbage."""

from __future__ import annotations

import asyncio
import gc
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.allocator import return_freed_memory

_ENOUGH = 16 << 20  # bytes of large bodies, after which the heap is trimmed also while requests run
_LARGE = 1 << 20  # bytes of a body
_GROWN = 32 << 20  # bytes by which the process must have grown, for the heap to be trimmed while nothing runs
_INTERVAL = 10.0  # seconds
_LONG = 0.02  # seconds of a full collection, after which the next one has to wait
_SHARE = 1000  # times as long it waits
_MUCH = 1 << 30  # bytes by which the process must have grown for it not to wait
_NEVER = 1 << 30  # collections of younger objects before a full one
_STATM = Path("/proc/self/statm")


class MallocTrimmer:
    """Trims glibc's heap, which is configured to keep freed memory, so that a prefill does not wait for page faults.

    It is trimmed after large bodies, and after all requests have ended. Ordinary requests never make it trim while
    others run.

    Python searches all objects for garbage whenever their number has grown by a quarter. With thousands of clients that
    takes 0.3 s, in which the event loop waits, and happens again and again while they come. In `rationed_collections`
    such a full collection takes a thousandth of the time at most, unless the process grows. Objects that are garbage
    soon are found without it.
    """

    def __init__(self) -> None:
        self._received = 0  # bytes of large bodies since the last trim
        self._large_since_idle = False
        self._resident = _resident_bytes()  # after the last trim
        self._thresholds = gc.get_threshold()
        self._began = 0.0  # CPU time of the thread that collects
        self._next_collection = 0.0  # not before
        self._collected = 0  # resident bytes after the last long collection

    def received(self, size: int) -> None:
        """Count the bytes of a body."""
        if size >= _LARGE:
            self._received += size
            self._large_since_idle = True

    async def trim_regularly(self, idle: Callable[[], bool], interval: float = _INTERVAL) -> None:
        """Trim again and again where that is worth it; never returns. `idle`: whether no request is being answered."""
        while True:
            await asyncio.sleep(interval)
            self._end_wait_for_collection()
            if idle():
                worth = self._large_since_idle or _resident_bytes() > self._resident + _GROWN
                self._large_since_idle = False
                if worth:
                    gc.collect()  # exceptions leave cycles that refer to whole bodies
            else:
                worth = self._received >= _ENOUGH
            if worth:
                self._received = 0
                await asyncio.to_thread(return_freed_memory)
                self._resident = _resident_bytes()

    @contextmanager
    def rationed_collections(self) -> Iterator[None]:
        """Let long collections wait, inside of `with` and while `trim_regularly` runs."""
        gc.callbacks.append(self._watch_collection)
        try:
            yield
        finally:
            gc.callbacks.remove(self._watch_collection)
            gc.set_threshold(*self._thresholds)

    def _watch_collection(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] < len(self._thresholds) - 1:
            return
        if phase == "start":
            self._began = time.thread_time()
        elif (seconds := time.thread_time() - self._began) > _LONG:
            gc.set_threshold(*self._thresholds[:-1], _NEVER)
            self._next_collection = time.monotonic() + _SHARE * seconds
            self._collected = _resident_bytes()

    def _end_wait_for_collection(self) -> None:
        if time.monotonic() >= self._next_collection or _resident_bytes() > self._collected + _MUCH:
            gc.set_threshold(*self._thresholds)


def _resident_bytes() -> int:
    """Memory of this process that is resident; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
