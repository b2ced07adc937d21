"""MXFP4 weights of stacked experts (gpt-oss)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.checkpoint.formats.fp4 import MXFP4_GROUP, fp4_groups, fp4_values, powers_of_two
from quire.engine.models.checkpoint.formats.integer_codes import check_tensor
from quire.engine.models.checkpoint.formats.stored_groups import StoredGroups
from quire.engine.models.checkpoint.formats.weight_format import (
    NamedWeight,
    StackedWeight,
    StoredTensors,
    WeightFormat,
    Window,
)
from quire.engine.models.errors import BrokenFolder
from quire.kernels.grouped_weight import GroupedWeight

_DIMENSIONS = 4  # of codes: experts, outputs, groups, bytes


class Mxfp4(WeightFormat):
    """Weights of which codes and scales are named: ..._blocks and ..._scales."""

    @override
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        weight = name.removesuffix("_blocks")
        scales = f"{weight}_scales"
        if weight == name or scales not in stored:
            return None
        codes = stored[name]
        if codes.dtype != torch.uint8 or codes.dim() != _DIMENSIONS or codes.shape[-1] != MXFP4_GROUP // 2:
            raise BrokenFolder(
                f"{name} is {str(codes.dtype).removeprefix('torch.')} of shape {tuple(codes.shape)}, not uint8 of "
                f"(experts, outputs, groups, {MXFP4_GROUP // 2})"
            )
        check_tensor(scales, stored[scales], (torch.uint8,), codes.shape[:-1])
        return NamedWeight(weight, Mxfp4Weight(codes, stored[scales]), (scales,))

    @override
    def is_part(self, name: str, stored: StoredTensors) -> bool:
        return name.endswith("_scales")


@dataclass(frozen=True, slots=True)
class Mxfp4Weight(StackedWeight):
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
        return experts, groups * MXFP4_GROUP, rows

    @override
    def part(self, window: Window) -> Self:
        return replace(self, window=window)

    @override
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        experts, columns, rows = self._slices()
        begin, end, _ = columns.indices(self.codes.shape[2] * MXFP4_GROUP)
        groups = slice(begin // MXFP4_GROUP, -(-end // MXFP4_GROUP))
        codes, scales = self.codes[experts, rows, groups], self.scales[experts, rows, groups]
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        exact = torch.float32 if dtype == torch.float16 else dtype  # which has the exponents of scales
        values = fp4_values().to(exact)[pairs.int()] * powers_of_two(scales)[..., None].to(exact)
        first = groups.start * MXFP4_GROUP
        return values.flatten(-2).transpose(1, 2)[:, begin - first : end - first].to(dtype)

    @override
    def experts(self) -> Sequence[StoredGroups] | None:
        experts, columns, rows = self._slices()
        begin, end, _ = columns.indices(self.codes.shape[2] * MXFP4_GROUP)
        if begin % MXFP4_GROUP or end % MXFP4_GROUP:
            return None
        groups = slice(begin // MXFP4_GROUP, end // MXFP4_GROUP)
        return [
            _expert(codes.flatten(1), scales)
            for codes, scales in zip(self.codes[experts, rows, groups], self.scales[experts, rows, groups], strict=True)
        ]

    def _slices(self) -> tuple[slice, slice, slice]:
        experts, columns, rows = self.window or (slice(None),) * 3
        return experts, columns, rows


def _expert(codes: Tensor, scales: Tensor) -> StoredGroups:
    """The weight of one expert. codes: (size_out, size_in / 2); scales: (size_out, groups)."""

    def read(rows: slice, columns: slice) -> GroupedWeight:
        return fp4_groups(codes, scales, MXFP4_GROUP, powers_of_two, rows, columns)

    return StoredGroups(len(codes), 2 * codes.shape[1], read, codes.nbytes + scales.nbytes)
