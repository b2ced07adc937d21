"""Settings of glibc's allocator. With other C libraries these functions have no effect."""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_KEPT = 1 << 30  # bytes; freed memory below this stays in the process
_PADDING = 64 << 20  # bytes by which the heap grows at least
_MAX_MMAP_THRESHOLD = 32 << 20  # of older versions


def use_one_arena() -> None:
    """Let threads that start from now on share the heap of the main thread.

    By default each thread has an arena. Memory of large requests in them is rarely free to the last byte, and
    the end of an arena is not returned to the system, so the process grows with the number of threads.
    """
    if libc := _glibc():
        libc.mallopt(_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Keep freed memory in the process until `return_freed_memory`.

    By default the memory of a prefill's tensors may be returned to the system, and the next prefill pays for page
    faults and zeroed pages again.
    """
    if libc := _glibc():
        libc.mallopt(_TRIM_THRESHOLD, _KEPT)
        libc.mallopt(_TOP_PAD, _PADDING)
        if not libc.mallopt(_MMAP_THRESHOLD, _KEPT):
            libc.mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)


def return_freed_memory() -> None:
    """Return freed memory to the system. Other threads wait meanwhile if they allocate; see `use_one_arena`."""
    if libc := _glibc():
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
