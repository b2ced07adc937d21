"""Linear layers whose weights are stored in groups, see `GroupedWeight`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.linear import PackedWeight


def can_pack_groups(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether some kernel of the device multiplies with weights in groups. `dtype`: of the products."""
    return False


def pack_groups(parts: Sequence[GroupedWeight], dtype: torch.dtype, device: torch.device) -> PackedWeight | None:
    """The weight whose rows are those of all parts, as a kernel reads it; None if none does."""
    return None
