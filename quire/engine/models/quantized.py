"""Unpacks packed weights while a checkpoint is loaded: MXFP4 experts (gpt-oss) and block-scaled FP8 (DeepSeek)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# The 16 values of FP4 (one sign, two exponent, one mantissa bit) in the order of their codes, OCP MX v1.0.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127

Unpack = Callable[[Tensor, Tensor, torch.dtype], Tensor]


def packing_of(name: str) -> tuple[str, str, Unpack]:
    """Return the unpacked weight's name, its scales' name and the unpack function for a tensor that may be packed."""
    if name.endswith("_blocks"):
        plain = name.removesuffix("_blocks")
        return plain, f"{plain}_scales", unpack_mxfp4
    return name, f"{name}_scale_inv", unpack_fp8


def is_scale(name: str) -> bool:
    """Whether a tensor holds the scales of another tensor."""
    return name.endswith(("_scales", "_scale_inv"))


def unpack_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack MXFP4: two codes per byte, the low one first, and a power-of-two scale for each 32 codes.

    Args:
        blocks: (experts, rows, groups, 16) uint8.
        scales: (experts, rows, groups) uint8 exponents.
        dtype: of the result.

    Returns:
        (experts, groups * 32, rows), the layout of unpacked experts in Hugging Face's models.
    """
    table = torch.tensor(_FP4, dtype=dtype)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    values = torch.ldexp(table[codes.int()], (scales.int() - _E8M0_BIAS)[..., None])
    return values.flatten(-2).transpose(1, 2)


def unpack_fp8(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack FP8 with a scale per block of rows and columns. Block sizes are powers of two, derived from the shapes."""
    rows, columns = (_block(size, count) for size, count in zip(weight.shape, scales.shape, strict=True))
    expanded = scales.float().repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)
    return (weight.float() * expanded[:, : weight.shape[1]]).to(dtype)


def _block(size: int, count: int) -> int:
    block = 1
    while -(-size // block) > count:
        block *= 2
    return block
