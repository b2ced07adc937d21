"""Free memory of the machine, within a container's limit too, and of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:  # a server whose engine is in a process of its own does not import it
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


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The use of a GPU's memory, in bytes.

    Attributes:
        total: all of it; free: what no process has.
        reserved: what PyTorch has in this process; allocated: tensors in it; peak: most of them since a reset.
    """

    total: int
    free: int
    reserved: int
    allocated: int
    peak: int

    @classmethod
    def of(cls, device: torch.device) -> GpuMemory:
        """That of a CUDA device, when its work is done."""
        import torch  # noqa: PLC0415 see above

        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        return cls(total, free, reserved, allocated, torch.cuda.max_memory_allocated(device))


def measure_largest_step(device: torch.device, largest_step: Callable[[], None]) -> tuple[GpuMemory, GpuMemory]:
    """The use of a GPU's memory before and after a model's largest step, which runs without a KV cache."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = GpuMemory.of(device)
    largest_step()
    after = GpuMemory.of(device)
    torch.cuda.empty_cache()
    return before, after


def gpu_cache_memory(before: GpuMemory, after: GpuMemory, utilization: float, share: MemoryShare | None) -> int:
    """Bytes for a KV cache on a GPU: a part of its memory, less what else uses it while the largest step runs.

    Args:
        before: before the largest step, without unused memory that PyTorch could free.
        after: after it.
        utilization: the part, for weights, KV caches and intermediate results of all engines of the server.
        share: of that part; None: there is one engine.
    """
    outside = after.total - after.free - after.reserved  # kernels, libraries and other processes
    held = before.reserved - before.allocated  # by graphs of other engines, whose memory nothing else may use
    left = int(after.total * utilization) - outside - held - after.peak
    if share is not None:
        left = (left - share.weights - share.steps) // share.engines
    return max(0, left)


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
