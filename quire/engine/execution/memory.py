"""How much memory is free for this process, in a container too."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
# Limit and use in bytes, of control groups version 2 and 1.
_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that are available on the machine, or left to the control group if that is less."""
    available = int(psutil.virtual_memory().available)
    for limit, used in _FILES:
        left = _number(cgroup / limit), _number(cgroup / used)
        if left[0] is not None and left[1] is not None:
            return min(available, max(0, left[0] - left[1]))
    return available


def _number(path: Path) -> int | None:
    """The file's number; none if there is no such file, or no limit."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
