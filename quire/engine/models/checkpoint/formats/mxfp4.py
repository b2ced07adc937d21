"""MXFP4 weights of stacked experts (gpt-oss)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.checkpoint.formats.weight_format import (
    NamedWeight,
    StoredTensors,
    StoredWeight,
    WeightFormat,
    Window,
)

# The 16 values of FP4 (one sign, two exponent, one mantissa bit) in the order of their codes, OCP MX v1.0.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127
_GROUP = 32  # codes with the same scale


class Mxfp4(WeightFormat):
    """Weights of which codes and scales are named: ..._blocks and ..._scales."""

    @override
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        weight = name.removesuffix("_blocks")
        scales = f"{weight}_scales"
        if weight == name or scales not in stored:
            return None
        return NamedWeight(weight, Mxfp4Weight(stored[name], stored[scales]), (scales,))

    @override
    def is_part(self, name: str) -> bool:
        return name.endswith("_scales")


@dataclass(frozen=True, slots=True)
class Mxfp4Weight(StoredWeight):
    """Two codes per byte, the low one first, and a power-of-two scale for each 32 codes.

    The weight is (experts, groups * 32, rows), the layout of unpacked experts in Hugging Face's models.

    Attributes:
        codes: (experts, rows, groups, 16) uint8.
        scales: (experts, rows, groups) uint8 exponents.
        window: the part of the weight that this is.
    """

    codes: Tensor
    scales: Tensor
    window: Window = ()

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        experts, rows, groups = self.codes.shape[:3]
        return experts, groups * _GROUP, rows

    @override
    def part(self, window: Window) -> Self:
        return replace(self, window=window)

    @override
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        experts, columns, rows = self.window or (slice(None),) * 3
        begin, end, _ = columns.indices(self.codes.shape[2] * _GROUP)
        groups = slice(begin // _GROUP, -(-end // _GROUP))
        codes, scales = self.codes[experts, rows, groups], self.scales[experts, rows, groups]
        table = torch.tensor(_FP4, dtype=dtype)
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        values = torch.ldexp(table[pairs.int()], (scales.int() - _E8M0_BIAS)[..., None])
        first = groups.start * _GROUP
        return values.flatten(-2).transpose(1, 2)[:, begin - first : end - first]
