"""KV pages of 8 bits a number: a row is its scale, a float32, and then its numbers as int8.

The scale comes first, so that the beginning of a row (the values of latent attention) is such a row itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = torch.float32.itemsize  # bytes in front of a row's numbers


def quantize_rows(x: Tensor) -> Tensor:
    """(..., dim) to rows (..., SCALE + dim) of int8; a row with a number that is not finite has such a scale."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / 127)
    whole = (wide / scale).round().nan_to_num().to(torch.int8)
    return torch.cat((scale.view(torch.int8), whole), -1)


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows (..., SCALE + dim) to what they stand for, (..., dim)."""
    scale, whole = rows[..., :SCALE].contiguous().view(torch.float32), rows[..., SCALE:]
    return (whole.float() * scale).to(dtype)
