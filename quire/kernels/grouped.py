"""Linear layers whose weights are stored in groups, see `GroupedWeight`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels import native
from quire.kernels.grouped_weight import GroupedWeight, alike, joined
from quire.kernels.linear import PackedWeight
from quire.kernels.packed_groups import PackedGroups, can_pack


def can_pack_groups(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether some kernel of the device multiplies with weights in groups.

    `dtype`: of the products. Those in float32 are exact, with dequantized weights: kernels round inputs to 8 bits.
    """
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float16) and native.instructions() is not None


def pack_groups(parts: Sequence[GroupedWeight], dtype: torch.dtype, device: torch.device) -> PackedWeight | None:
    """The weight whose rows are those of all parts, as a kernel reads it; None if none does."""
    if not can_pack_groups(dtype, device) or not all(can_pack(part) for part in parts):
        return None
    runs: list[list[GroupedWeight]] = []
    for part in parts:
        if runs and alike(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    whole = [run[0] if len(run) == 1 else joined(run) for run in runs]
    return PackedGroups([weight for weight in whole if weight is not None], dtype)
