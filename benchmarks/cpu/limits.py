"""Measured limits of this machine (memory bandwidth, arithmetic), and timing helpers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.kernels import native

READ_BYTES = 1 << 29  # bytes, more than any cache
_SIDE = 2048


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
        memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
        dtype = torch.bfloat16 if native.has_bfloat16() else torch.float32
        first, second = (torch.randn(_SIDE, _SIDE).to(dtype) for _ in range(2))
        read = best(memory.max, 8)
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
