"""Unpacks packed weights while a checkpoint is loaded: MXFP4 experts (gpt-oss) and scaled FP8 (DeepSeek, Mistral)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.models.config.fp8 import Fp8Scales

# The 16 values of FP4 (one sign, two exponent, one mantissa bit) in the order of their codes, OCP MX v1.0.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Suffixes of the names of a module's weight scales, and of its input scales, which are not needed.
_WEIGHT_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")
_INPUT_SCALES = (".activation_scale", ".input_scale", ".qscale_act")


def scales_of(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the unpacked weight's name, and the names that its scales may have, for a tensor that may be packed."""
    if name.endswith("_blocks"):
        plain = name.removesuffix("_blocks")
        return plain, (f"{plain}_scales",)
    module = name.removesuffix(".weight")
    return name, (f"{name}_scale_inv",) if module == name else tuple(module + suffix for suffix in _WEIGHT_SCALES)


def is_scale(name: str) -> bool:
    """Whether a tensor holds the scales of another tensor, or of a layer's inputs."""
    return name.endswith(("_scales", "_scale_inv", *_WEIGHT_SCALES, *_INPUT_SCALES))


Window = Sequence[slice]  # of an unpacked tensor: the part of each dimension that is wanted
_CODES = 32  # MXFP4 codes with the same scale


def mxfp4_shape(blocks: Tensor) -> tuple[int, ...]:
    """Shape of an unpacked tensor, see `unpack_mxfp4`."""
    experts, rows, groups = blocks.shape[:3]
    return experts, groups * _CODES, rows


def unpack_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype, window: Window | None = None) -> Tensor:
    """Unpack MXFP4: two codes per byte, the low one first, and a power-of-two scale for each 32 codes.

    Args:
        blocks: (experts, rows, groups, 16) uint8.
        scales: (experts, rows, groups) uint8 exponents.
        dtype: dtype of the result.
        window: the part of the result that is wanted; None: all.

    Returns:
        (experts, groups * 32, rows), the layout of unpacked experts in Hugging Face's models; of it the window.
    """
    if window is not None:
        experts, columns, rows = window
        begin, _, _ = columns.indices(blocks.shape[2] * _CODES)
        groups = slice(begin // _CODES, None if columns.stop is None else -(-columns.stop // _CODES))
        whole = unpack_mxfp4(blocks[experts, rows, groups], scales[experts, rows, groups], dtype)
        first = begin - begin // _CODES * _CODES
        return whole[:, first : None if columns.stop is None else first + columns.stop - begin]
    table = torch.tensor(_FP4, dtype=dtype)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    values = torch.ldexp(table[codes.int()], (scales.int() - _E8M0_BIAS)[..., None])
    return values.flatten(-2).transpose(1, 2)


def unpack_fp8(
    weight: Tensor, scales: Tensor, dtype: torch.dtype, scaling: Fp8Scales, window: Window | None = None
) -> Tensor:
    """Unpack FP8 (rows, columns) with one scale, one for each row, or one for each block.

    `window`: the part of the result that is wanted; None: all.

    Raises:
        ValueError: the shape of the scales is none of these, or a dtype is not a floating-point one.
    """
    if weight.dtype not in FP8_DTYPES or not scales.dtype.is_floating_point:
        raise ValueError(f"weights are {weight.dtype} and scales {scales.dtype}, not 8-bit and other floating point")
    wanted = tuple(window or ()) + (slice(None),) * (weight.dim() - len(window or ()))
    return (weight[wanted].float() * _expanded(scales.float(), weight, scaling, wanted)).to(dtype)


def _expanded(scales: Tensor, weight: Tensor, scaling: Fp8Scales, window: Window) -> Tensor:
    """Scales in a shape that can be multiplied with the window of the weight."""
    if scales.numel() == 1:
        return scales.flatten()
    if weight.dim() == 2 and tuple(scales.shape) in ((len(weight),), (len(weight), 1)):
        return scales.view(-1, 1)[window[0]]
    if scaling.block is None or weight.dim() != 2:
        raise ValueError(
            f"scales have shape {tuple(scales.shape)}, but the weight needs one scale, or one for each row"
        )
    (height, width), (rows, columns) = scaling.block, weight.shape
    wanted = (-(-rows // height), -(-columns // width))
    if tuple(scales.shape) != wanted:
        raise ValueError(f"scales have shape {tuple(scales.shape)}, but blocks of {height} x {width} need {wanted}")
    row_blocks, column_blocks = torch.arange(rows) // height, torch.arange(columns) // width
    return scales[row_blocks[window[0], None], column_blocks[window[1]]]
