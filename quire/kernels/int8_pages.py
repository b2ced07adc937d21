"""KV pages of int8: a row is the float32 scales of groups of its elements, the last group's first, and the elements.

So the beginning of a row, with the scales of its groups, has the same format: it is the values of latent attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE = torch.float32.itemsize  # bytes
GROUP = 64  # elements that share a scale, as in ``csrc/int8_rows.h``; the last ones of a row may be fewer


def scale_bytes(dim: int) -> int:
    """Bytes in front of the elements of a row of `dim`."""
    return -(-dim // GROUP) * SCALE


def row_dim(width: int) -> int:
    """Elements of a row of `width` bytes."""
    return width - -(-width // (GROUP + SCALE)) * SCALE


def quantize_rows(x: Tensor) -> Tensor:
    """(..., dim) to int8 rows (..., bytes). The scale of a group with NaN or inf is NaN or inf, that of zeros is 0."""
    dim = x.shape[-1]
    groups = F.pad(x.float(), (0, -dim % GROUP)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    scales = largest / 127
    quantized = (groups / scales).round().nan_to_num().to(torch.int8).flatten(-2)[..., :dim]
    return torch.cat((scales[..., 0].flip(-1).contiguous().view(torch.int8), quantized), -1)


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Int8 rows (..., bytes) to (..., dim)."""
    dim = row_dim(rows.shape[-1])
    scales = rows[..., : rows.shape[-1] - dim].contiguous().view(torch.float32).flip(-1)
    return (rows[..., -dim:].float() * scales.repeat_interleave(GROUP, -1)[..., :dim]).to(dtype)
