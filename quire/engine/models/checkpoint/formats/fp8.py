"""FP8 weights with one scale, one for each row, or one for each block (DeepSeek, Mistral)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.checkpoint.formats.fp4 import powers_of_two
from quire.engine.models.checkpoint.formats.weight_format import (
    NamedWeight,
    StoredTensors,
    StoredWeight,
    WeightFormat,
    Window,
)
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.kernels.gpu_weights import BLOCK
from quire.kernels.linear import Quantization

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Suffixes of the names of a module's weight scales, and of its input scales, which are not needed.
_WEIGHT_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")
_ANY_SCALE = ".scale"  # may also be a weight that is learned, as of Gemma 4's routers
_INPUT_SCALES = (".activation_scale", ".input_scale", ".input_scale_ub", ".qscale_act")
DEFAULT_BLOCK = (128, 128)
_DIMENSIONS_OF_BLOCKS = 4  # of ModelOpt's scales


class Fp8(WeightFormat):
    """FP8 weights, whose scales have one of several names."""

    def __init__(self, section: Mapping[str, Any] | None = None) -> None:
        """`section`: of the config; None: the config has none, and a weight has scales or is no scaled one.

        Raises:
            UnsupportedModel: the block size is not a pair of numbers.
        """
        self._is_certain = section is not None
        self._block = DEFAULT_BLOCK if section is None else _block(section)

    @override
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        candidates = _scales_of(name)
        scales = next((candidate for candidate in candidates if _is_scale(candidate, stored)), None)
        if scales is not None:
            return NamedWeight(name, Fp8Weight(stored[name], stored[scales], self._block), (scales,))
        if self._is_certain and (dtype := stored[name].dtype) in FP8_DTYPES:
            raise BrokenFolder(f"{name} is {str(dtype).removeprefix('torch.')}, but {candidates[0]} is missing")
        return None

    @override
    def is_part(self, name: str, stored: StoredTensors) -> bool:
        if name.endswith(_ANY_SCALE):
            return _is_scale(name, stored)
        return name.endswith(("_scale_inv", *_WEIGHT_SCALES, *_INPUT_SCALES))

    @override
    def requantized(self, quantization: Quantization) -> Quantization:
        blocks = self._is_certain and self._block == (BLOCK, BLOCK)
        return "fp8_blocks" if blocks and quantization == "fp8" else quantization


def _is_scale(name: str, stored: StoredTensors) -> bool:
    """Whether a tensor is there, and if its name may mean something else, belongs to a weight in FP8."""
    if name not in stored or not name.endswith(_ANY_SCALE):
        return name in stored
    weight = f"{name.removesuffix(_ANY_SCALE)}.weight"
    return weight in stored and stored[weight].dtype in FP8_DTYPES


def _scales_of(name: str) -> tuple[str, ...]:
    """The names that the scales of a tensor may have."""
    module = name.removesuffix(".weight")
    return (f"{name}_scale_inv",) if module == name else tuple(module + suffix for suffix in _WEIGHT_SCALES)


def _block(section: Mapping[str, Any]) -> tuple[int, int] | None:
    block = section.get("weight_block_size", DEFAULT_BLOCK)
    if block is None:
        return None
    if not isinstance(block, Sequence) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise UnsupportedModel(f"quantization_config: weight_block_size must be two positive integers, not {block!r}")
    return block[0], block[1]


@dataclass(frozen=True, slots=True)
class Fp8Weight(StoredWeight):
    """FP8 numbers with scales.

    Attributes:
        codes: the whole weight.
        scales: one, one for each row, or one for each block, of which ModelOpt has them as (n, 1, m, 1). Numbers, or
            exponents of 2 (uint8 or E8M0).
        block: rows and columns that share a scale; None: there are no blocks.
        window: the part of the weight that this is.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int] | None = DEFAULT_BLOCK
    window: Window = ()

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @override
    def part(self, window: Window) -> Self:
        return replace(self, window=window)

    @override
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        scales = self.scales.dtype
        if self.codes.dtype not in FP8_DTYPES or not (scales.is_floating_point or scales is torch.uint8):
            raise ValueError(
                f"weights are {self.codes.dtype} and scales {self.scales.dtype}, not 8-bit and other floating point"
            )
        window = tuple(self.window) + (slice(None),) * (self.codes.dim() - len(self.window))
        return (self.codes[window].float() * self._factors(window)).to(dtype)

    def _factors(self, window: Window) -> Tensor:
        """Scales in a shape that can be multiplied with the window of the weight."""
        weight = self.codes
        scales = powers_of_two(self.scales) if self.scales.dtype is torch.uint8 else self.scales.float()
        if scales.dim() == _DIMENSIONS_OF_BLOCKS and scales.shape[1] == scales.shape[3] == 1:
            scales = scales[:, 0, :, 0]
        if scales.numel() == 1:
            return scales.flatten()
        if weight.dim() == 2 and tuple(scales.shape) in ((len(weight),), (len(weight), 1)):
            return scales.view(-1, 1)[window[0]]
        if self.block is None or weight.dim() != 2:
            raise ValueError(
                f"scales have shape {tuple(scales.shape)}, but the weight needs one scale, or one for each row"
            )
        (height, width), (rows, columns) = self.block, weight.shape
        blocks = (-(-rows // height), -(-columns // width))
        if tuple(scales.shape) != blocks:
            raise ValueError(f"scales have shape {tuple(scales.shape)}, but blocks of {height} x {width} need {blocks}")
        row_blocks, column_blocks = torch.arange(rows) // height, torch.arange(columns) // width
        return scales[row_blocks[window[0], None], column_blocks[window[1]]]
