"""The memory of GPUs: what steps need, and what a KV cache gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.engine.execution.memory import MemoryShare


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
