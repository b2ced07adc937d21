"""Returns memory to the system that large request bodies have left in the C library's heap."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable

_ENOUGH = 16 << 20  # bytes of large bodies
_LARGE = 1 << 20  # bytes of a body
_INTERVAL = 10.0  # seconds


class Heap:
    """Trims the heap of glibc, which is told to keep what is freed, so that a prefill does not wait for page faults.

    Ordinary requests never make it trim. Has no effect with other C libraries.
    """

    def __init__(self) -> None:
        self._received = 0
        self._trim = _glibc_trim()

    def received(self, size: int) -> None:
        """Count the bytes of a body."""
        if size >= _LARGE:
            self._received += size

    async def trim_regularly(self, interval: float = _INTERVAL) -> None:
        """Trim again and again where large bodies have been received; never returns."""
        while True:
            await asyncio.sleep(interval)
            if self._received >= _ENOUGH:
                self._received = 0
                await asyncio.to_thread(self._trim)


def _glibc_trim() -> Callable[[], object]:
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        return lambda: libc.malloc_trim(0)
    return lambda: None
