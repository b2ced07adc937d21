"""How much memory is free for this process, in a container too; and that it keeps what it frees."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection
from pathlib import Path

import psutil

# Parameters of glibc's mallopt, the bytes above which freed memory would go back to the system at once, and those of a
# thread's heap: an empty one is given back unless as much is to lie ready.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEPT, _HEAP = 1 << 30, 64 << 20
_CGROUP = Path("/sys/fs/cgroup")
# Limit, use and statistics of control groups version 2 and 1, and what the page cache is called in the last.
_FILES = (
    ("memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_inactive_file", "total_active_file"),
    ),
)


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that are available on the machine, or left to the control group if that is less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file, stat_file, cached in _FILES:
        limit, used = _number(cgroup / limit_file), _number(cgroup / used_file)
        if limit is not None and used is not None:
            # The kernel counts the page cache as used, but gives it up where memory is short.
            used -= min(used, _sum(cgroup / stat_file, cached))
            return min(available, max(0, limit - used))
    return available


def keep_freed_memory() -> None:
    """Have the C library keep what is freed.

    By default it may return a prefill's tensors to the system, which then finds and clears them page by page for the
    next one. Other threads than the first one get tensors of more than 64 MiB from the system all the same. Other C
    libraries than glibc are left as they are.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_TRIM_THRESHOLD, _KEPT)
        libc.mallopt(_TOP_PAD, _HEAP)
        if not libc.mallopt(_MMAP_THRESHOLD, _KEPT):
            libc.mallopt(_MMAP_THRESHOLD, _HEAP // 2)  # the most that older versions take


def _number(path: Path) -> int | None:
    """The file's number; none if there is no such file, or no limit."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _sum(path: Path, names: Collection[str]) -> int:
    """Sum of some of a file's `name number` lines."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return sum(int(line[1]) for line in lines if line[0] in names)
    except (OSError, ValueError, IndexError):
        return 0
