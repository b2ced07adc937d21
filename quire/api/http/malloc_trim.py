"""Returns memory to the system that requests have left in the C library's heap."""

from __future__ import annotations

import asyncio
import gc
import mmap
from collections.abc import Callable
from pathlib import Path

from quire.allocator import return_freed_memory

_ENOUGH = 16 << 20  # bytes of large bodies, after which the heap is trimmed also while requests run
_LARGE = 1 << 20  # bytes of a body
_GROWN = 32 << 20  # bytes by which the process must have grown, for the heap to be trimmed while nothing runs
_INTERVAL = 10.0  # seconds
_STATM = Path("/proc/self/statm")


class MallocTrimmer:
    """Trims glibc's heap, which is configured to keep freed memory, so that a prefill does not wait for page faults.

    It is trimmed after large bodies, and after all requests have ended. Ordinary requests never make it trim while
    others run.
    """

    def __init__(self) -> None:
        self._received = 0  # bytes of large bodies since the last trim
        self._large_since_idle = False
        self._resident = _resident_bytes()  # after the last trim

    def received(self, size: int) -> None:
        """Count the bytes of a body."""
        if size >= _LARGE:
            self._received += size
            self._large_since_idle = True

    async def trim_regularly(self, idle: Callable[[], bool], interval: float = _INTERVAL) -> None:
        """Trim again and again where that is worth it; never returns. `idle`: whether no request is being answered."""
        while True:
            await asyncio.sleep(interval)
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


def _resident_bytes() -> int:
    """Memory of this process that is resident; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
