"""What this machine can do at most, measured, and how its kernels are timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_READ = 1 << 29  # bytes, more than any cache
_SIDE = 2048


@dataclass(frozen=True)
class Limits:
    """Best of several runs: bytes read a second, and bfloat16 operations a second of a large product."""

    bandwidth: float
    operations: float

    @classmethod
    def measured(cls) -> Limits:
        """Of the threads that torch uses now."""
        memory = torch.ones(_READ // 8, dtype=torch.int64)
        one, other = (torch.randn(_SIDE, _SIDE).bfloat16() for _ in range(2))
        read = best(memory.max, 8)
        product = best(lambda: one @ other, 8)
        return cls(_READ / read, 2 * _SIDE**3 / product)


def best(call: Callable[[], object], runs: int) -> float:
    """Seconds of the fastest run: on a shared machine all others measure the neighbours."""
    return timed(call, runs)[0]


def timed(call: Callable[[], object], runs: int) -> tuple[float, float]:
    """Seconds of the fastest run and of the median one, after two that do not count."""
    times = []
    for _ in range(runs + 2):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    ordered = sorted(times[2:])
    return ordered[0], ordered[len(ordered) // 2]
