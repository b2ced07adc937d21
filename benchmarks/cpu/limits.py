"""Measured limits of this machine (memory bandwidth, arithmetic), and timing helpers."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.kernels import native
from quire.kernels.huge_pages import map_huge_pages

READ_BYTES = 1 << 30  # bytes, more than any cache
_SIDE = 2048
_SOURCE = Path(__file__).with_name("read.cpp")


@functools.cache
def _compiled_read() -> ctypes.CDLL:
    """Return the compiled functions of read.cpp. torch's own reductions read 0.6 to 0.9 of what processors can."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "read.so")
        subprocess.run(
            ["c++", "-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-pthread", _SOURCE, "-o", library],
            check=True,
        )
        return ctypes.CDLL(str(library))


class MemoryRead:
    """Memory in huge pages, as weights are, which calls read once with torch's current number of threads.

    Raises:
        OSError, subprocess.CalledProcessError: there is no compiler, or it fails.
    """

    def __init__(self, size: int = READ_BYTES) -> None:
        """Take memory of some bytes."""
        self._memory = map_huge_pages(size).fill_(1)
        self._read = _compiled_read().read_memory

    def __call__(self) -> None:
        """Read it."""
        words = ctypes.c_int64(len(self._memory) // 8)
        self._read(ctypes.c_void_p(self._memory.data_ptr()), words, torch.get_num_threads())


@dataclass(frozen=True)
class Limits:
    """Bytes read per second, and operations per second of a large matrix product; best of several runs.

    The product is of bfloat16 where there are instructions for it, else of float32.
    """

    bandwidth: float
    operations: float

    @classmethod
    def measured(cls) -> Limits:
        """Measure the limits with torch's current number of threads."""
        dtype = torch.bfloat16 if native.has_bfloat16() else torch.float32
        first, second = (torch.randn(_SIDE, _SIDE).to(dtype) for _ in range(2))
        read = best(MemoryRead(), 8)
        product = best(lambda: first @ second, 8)
        return cls(READ_BYTES / read, 2 * _SIDE**3 / product)


def best(call: Callable[[], object], runs: int) -> float:
    """Return seconds of the fastest run: slower runs on a shared machine measure the other processes."""
    return timed(call, runs)[0]


def timed(call: Callable[[], object], runs: int) -> tuple[float, float]:
    """Return seconds of the fastest and the median run, after two warm-up runs."""
    times = []
    for _ in range(runs + 2):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    ordered = sorted(times[2:])
    return ordered[0], ordered[len(ordered) // 2]
