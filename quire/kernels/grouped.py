"""Linear layers whose weights are stored in groups, see `GroupedWeight`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from quire.kernels import gpu, native
from quire.kernels.gpu_groups import GpuWeightParts, GroupedGpuWeight, can_format, format_groups
from quire.kernels.grouped_weight import GroupedWeight, alike, joined
from quire.kernels.linear import PackedWeight
from quire.kernels.packed_groups import PackedGroups, can_pack


def can_pack_groups(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether some kernel of the device multiplies with weights in groups.

    `dtype`: of the products. Those in float32 are exact, with dequantized weights: kernels of CPUs round inputs to 8
    bits, those of GPUs weights to 16.
    """
    return _kernels(dtype, device) is not None


def _kernels(dtype: torch.dtype, device: torch.device) -> Literal["cpu", "gpu"] | None:
    """Which kernels multiply with weights in groups."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    if device.type == "cpu" and native.instructions() is not None:
        return "cpu"
    return "gpu" if gpu.runs_on(device) else None


def pack_groups(parts: Sequence[GroupedWeight], dtype: torch.dtype, device: torch.device) -> PackedWeight | None:
    """The weight whose rows are those of all parts, as a kernel reads it; None if none does."""
    kernels = _kernels(dtype, device)
    reads = can_pack if kernels == "cpu" else can_format
    if kernels is None or not all(reads(part) for part in parts):
        return None
    runs: list[list[GroupedWeight]] = []
    for part in parts:
        if runs and alike(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    whole = [run[0] if len(run) == 1 else joined(run) for run in runs]
    weights = [weight for weight in whole if weight is not None]
    if kernels == "cpu":
        return PackedGroups(weights, dtype)
    packed = [GroupedGpuWeight(format_groups(weight, dtype, device)) for weight in weights]
    return packed[0] if len(packed) == 1 else GpuWeightParts(packed)
