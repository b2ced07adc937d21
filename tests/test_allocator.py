"""Freed memory is reused by the process until it is returned to the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

GLIBC = sys.platform == "linux" and "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
pytestmark = pytest.mark.skipif(not GLIBC, reason="needs glibc's mallopt")

# Page faults of a thread that allocates and frees three tensors, five times. The first twenty rounds let the allocator
# reach a steady state.
REUSE = """
import resource, sys, threading, torch
from quire.allocator import keep_freed_memory, use_one_arena
use_one_arena()
keep_freed_memory()
def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        [torch.ones(int(sys.argv[1]) << 18) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def run():
    faults(20)
    print(faults(5))
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""

# Megabytes that 16 threads leave, each of which has allocated and freed 40 MB in small pieces but one.
RETURN = """
import ctypes, mmap, threading
from pathlib import Path
from quire.allocator import keep_freed_memory, return_freed_memory, use_one_arena
use_one_arena()
keep_freed_memory()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
allocated, freed, kept = threading.Barrier(16), threading.Barrier(17), []
def run():
    kept.append(bytearray(2000))
    pieces = [bytearray(2000) for _ in range(20000)]
    allocated.wait()
    pieces.clear()
    freed.wait()
    freed.wait()
before = resident()
threads = [threading.Thread(target=run) for _ in range(16)]
for thread in threads:
    thread.start()
freed.wait()
return_freed_memory()
print((resident() - before) >> 20)
freed.wait()
"""


def run(script: str, *arguments: str) -> int:
    command = [sys.executable, "-c", script, *arguments]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


# glibc raises its own threshold to at most 32 MB, so that smaller tensors are the easier case.
@pytest.mark.parametrize("megabytes", [pytest.param(24, marks=pytest.mark.slow), 40])
def test_freed_tensors_are_reused_without_page_faults(megabytes: int) -> None:
    pages = 5 * 3 * 256 * megabytes
    assert run(REUSE, str(megabytes)) < pages / 10  # the system may take back a few


def test_what_many_threads_have_freed_is_returned() -> None:
    assert run(RETURN) < 100  # of 640
