"""Linear layers with bfloat16 weights in panels, which the compiled kernel reads as they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import native

PANEL = 32  # outputs


def packs(weight: Tensor) -> bool:
    """Whether there is a kernel for such a weight (size_out, size_in)."""
    return bool(weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and native.take(weight))


def pack(weight: Tensor) -> Tensor:
    """(size_out, size_in) as (panels, size_in / 2, 32, 2); outputs that fill the last panel are 0."""
    size_out, size_in = weight.shape
    pairs = weight.view(torch.int32)
    packed = torch.zeros(-(-size_out // PANEL), size_in // 2, PANEL, dtype=torch.int32)
    whole = size_out // PANEL
    packed[:whole] = pairs[: whole * PANEL].unflatten(0, (whole, PANEL)).transpose(1, 2)
    if whole < len(packed):
        packed[whole, :, : size_out - whole * PANEL] = pairs[whole * PANEL :].T
    panels: Tensor = packed.view(torch.bfloat16).unflatten(2, (PANEL, 2))
    return panels


def packed_linear(x: Tensor, packed: Tensor, size_out: int, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """x W^T + b.

    Args:
        x: (rows, size_in) bfloat16.
        packed: what `pack` made of W.
        bias: (size_out,) float32.
        wide: give float32 instead of bfloat16.

    Returns:
        (rows, size_out)
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, size_in = x.shape
    out = torch.empty((rows, size_out), dtype=torch.float32 if wide else torch.bfloat16)
    if rows:
        native.kernels.linear(
            x.data_ptr(), packed.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            rows, size_in, size_out, x.stride(0), int(wide),
        )  # fmt: skip
    return out
