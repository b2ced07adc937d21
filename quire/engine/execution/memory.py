"""Free memory of the machine, within a container's limit too, and what an engine takes of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
# Limit, usage and statistics of control groups version 2 and 1, and the page cache's fields in the statistics.
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
    """Return the bytes available on the machine, or within the limit of the control group if that is less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file, stat_file, cached in _FILES:
        limit, used = _read_int(cgroup / limit_file), _read_int(cgroup / used_file)
        if limit is not None and used is not None:
            # The kernel counts the page cache as used, but reclaims it when memory is short.
            used -= min(used, _sum_fields(cgroup / stat_file, cached))
            return min(available, max(0, limit - used))
    return available


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """What an engine takes of the memory that it shares with the other engines of its server.

    On the host all shares are computed before the engines load. On a GPU engines are built one after the other, and
    each measures what the earlier ones have left.

    Attributes:
        host_bytes: bytes of the host's memory, beside weights.
        engines: engines with a KV cache that are not built yet, this one included.
        weights: bytes of the weights of the engines that are built after this one.
        steps: bytes of the intermediate results of the engines that are built, which they do not hold between steps.
    """

    host_bytes: int
    engines: int = 1
    weights: int = 0
    steps: int = 0


def _read_int(path: Path) -> int | None:
    """The file's integer; None if there is no such file, or if it says "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _sum_fields(path: Path, names: Collection[str]) -> int:
    """Sum of the named fields in a file of `name number` lines."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return sum(int(line[1]) for line in lines if line[0] in names)
    except (OSError, ValueError, IndexError):
        return 0
