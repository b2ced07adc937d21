"""What becomes of memory that was freed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Page faults of five tensors of 48 MB, each given back before the next; the allocator may need some to find its form.
TURNS = """
import resource, torch
from quire.engine.execution.memory import keep_freed_memory
keep_freed_memory()
def faults(turns):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(turns):
        torch.ones(12 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(20)
print(faults(5))
"""
GLIBC = sys.platform == "linux" and "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")


@pytest.mark.skipif(not GLIBC, reason="only glibc can be told")
def test_the_system_does_not_find_the_same_memory_again_and_again() -> None:
    printed = subprocess.run([sys.executable, "-c", TURNS], capture_output=True, text=True, check=True).stdout
    assert int(printed) < 1000  # of 5 * 12,288 pages
