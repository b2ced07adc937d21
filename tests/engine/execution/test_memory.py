"""What becomes of memory that was freed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Page faults of a thread that makes three tensors of 24 MB and gives them back, five times; the allocator may need
# some turns to find its form.
TURNS = """
import resource, threading, torch
from quire.engine.execution.memory import keep_freed_memory
keep_freed_memory()
def faults(turns):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(turns):
        [torch.ones(6 << 20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def run():
    faults(20)
    print(faults(5))
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
GLIBC = sys.platform == "linux" and "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")


@pytest.mark.skipif(not GLIBC, reason="only glibc can be told")
def test_the_system_does_not_find_the_same_memory_again_and_again() -> None:
    printed = subprocess.run([sys.executable, "-c", TURNS], capture_output=True, text=True, check=True).stdout
    assert int(printed) < 1000  # of 5 * 18,432 pages
