"""Free memory of the machine, within a container's limit too, and of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import psutil
import torch

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


def gpu_cache_memory(device: torch.device, utilization: float, largest_step: Callable[[], None]) -> int:
    """Bytes for a KV cache on a GPU: a share of its memory, less what else uses it while the largest step runs.

    Args:
        device: a CUDA device.
        utilization: the share, for weights, KV cache and intermediate results together.
        largest_step: runs the model's largest step, without a KV cache.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    largest_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)  # kernels, libraries and other processes
    torch.cuda.empty_cache()
    return max(0, int(total * utilization) - outside - peak)


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
