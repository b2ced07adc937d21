"""KV pages of int8: a row is its float32 scale and then its elements.

The scale comes first so that the beginning of a row has the same format: it is the values of latent attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = torch.float32.itemsize  # bytes in front of a row's elements


def quantize_rows(x: Tensor) -> Tensor:
    """(..., dim) to int8 rows (..., SCALE + dim). The scale of a row with NaN or inf is NaN or inf."""
    values = x.float()
    largest = values.abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / 127)
    quantized = (values / scale).round().nan_to_num().to(torch.int8)
    return torch.cat((scale.view(torch.int8), quantized), -1)


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Int8 rows (..., SCALE + dim) to (..., dim)."""
    scale, quantized = rows[..., :SCALE].contiguous().view(torch.float32), rows[..., SCALE:]
    return (quantized.float() * scale).to(dtype)
