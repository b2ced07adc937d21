"""Freed memory is reused by the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Page faults of a thread that allocates and frees three tensors of 24 MB, five times. The first twenty rounds let the
# allocator reach a steady state.
SCRIPT = """
import resource, threading, torch
from quire.engine.execution.memory import keep_freed_memory
keep_freed_memory()
def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
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


@pytest.mark.skipif(not GLIBC, reason="needs glibc's mallopt")
def test_freed_tensors_are_reused_without_page_faults() -> None:
    printed = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    assert int(printed) < 1000  # of 5 * 18,432 pages
