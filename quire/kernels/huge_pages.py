"""Memory in huge pages for tensors that are read again and again.

Decoding reads all weights for each token, at the speed of memory: from pages of 4 KiB at 0.8 of it, since the processor
looks up each of them and fetches ahead within one. Tensors of less than a huge page, of which small models have
hundreds, would lie in small pages of the heap.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20  # bytes
_CHUNK = 16 << 20  # bytes that small tensors share; what nothing is written to takes no memory
_ALIGNMENT = 64


class _Chunks:
    """Memory of which tensors get parts, one after the other. A chunk is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)  # that tensors get parts of
        self._taken = 0  # bytes of it

    def take(self, size: int) -> Tensor:
        """Return memory: (size,) uint8."""
        if size >= _HUGE_PAGE:
            return torch.empty(size, dtype=torch.uint8)  # in huge pages by THP_MEM_ALLOC_ENABLE
        with self._lock:
            if self._taken + size > len(self._chunk):
                self._chunk, self._taken = map_huge_pages(_CHUNK), 0
            begin = self._taken
            self._taken += -(-size // _ALIGNMENT) * _ALIGNMENT
            return self._chunk[begin : begin + size]


_chunks = _Chunks()


def empty_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor on the CPU, in huge pages as far as the system has any."""
    nbytes = math.prod(shape) * dtype.itemsize
    return _chunks.take(nbytes).view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)


def map_huge_pages(size: int) -> Tensor:
    """Return zeros (size,) uint8 in a mapping of their own, whose memory is not resident until it is written.

    Raises:
        OSError, OverflowError: so much cannot be reserved.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
