"""Weights in groups as the Triton kernels read them; the layout is that of `quire.kernels.triton.groups`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gpu_weights import GpuWeight, WeightData, take_weight_rows
from quire.kernels.grouped_weight import GroupedWeight, checked_order, common_zero, row_powers
from quire.kernels.groups import Groups

_UNIT = 64  # bytes of a row that lie together, and rows
_BLOCK = 128  # inputs that weights are padded to whole numbers of
_OUTPUTS = 32 * _UNIT  # packed at a time, which takes several times their memory
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class GroupedGpuWeight(GpuWeight):
    """A weight in groups whose rows can be read, too."""

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight by their indices, dequantized: (n, size_in)."""
        return take_weight_rows(self.data, indices)


class GpuWeightParts:
    """A weight whose rows are those of several, each in its own format."""

    def __init__(self, parts: Sequence[GpuWeight]) -> None:
        self._parts = list(parts)
        self._size_out = sum(part.size_out for part in parts)
        self.nbytes = sum(part.nbytes for part in parts)

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None,
        *,
        act: str | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """act(x W^T + b); see `PackedWeight`."""
        if out is None:
            out = torch.empty((len(x), self._size_out), dtype=out_dtype or x.dtype, device=x.device)
        begin = 0
        for part in self._parts:
            end = begin + part.size_out
            part(x, None if bias is None else bias[begin:end], act=act, out=out[:, begin:end])
            begin = end
        return out


def can_format(weight: GroupedWeight) -> bool:
    """Whether the kernels read a weight: one group a row, or groups of a multiple of 16 inputs."""
    return _kernel_group(weight) is not None


def _kernel_group(weight: GroupedWeight) -> int | None:
    """Inputs of a group as the kernels have it, of which one of the weight's may be several."""
    if weight.scales.shape[1] == 1:
        return -(-weight.shape[1] // _BLOCK) * _BLOCK
    if weight.group % _UNIT == 0:
        return weight.group
    return next((group for group in (32, 16) if weight.group % group == 0), None)


def format_groups(weight: GroupedWeight, dtype: torch.dtype, device: torch.device) -> WeightData:
    """A weight on its device, see `can_format`; scales and minimums are rounded to float16.

    `dtype`: of the rows that it is multiplied with.
    """
    size_out, size_in = weight.shape
    group = _kernel_group(weight)
    assert group is not None
    order = None if weight.order is None else checked_order(weight.order, size_in).to(device)
    codes, table, unit = _codes(weight)
    scales = weight.scales.to(device) * unit
    minimums = None if weight.minimums is None else weight.minimums.to(device)
    zero = common_zero(scales, minimums)
    levels = [scales] if zero is not None or minimums is None else [scales, minimums]
    powers = row_powers(levels)
    halves = [_by_group(level / powers[:, None], weight.group // group, group, size_in) for level in levels]
    groups = Groups(
        codes=codes,
        group=group,
        zero=zero or 0,
        size_out=size_out,
        size_in=size_in,
        dtype=dtype,
        minimums=halves[1] if len(halves) > 1 else None,
        named_factors={},
        table=None if table is None else table.to(device),
        order=order,
    )
    groups = replace(groups, named_factors={groups.layout: powers})
    return WeightData("groups", _units(weight.codes.to(device), weight.bits), halves[0], groups)


def _codes(weight: GroupedWeight) -> tuple[str, Tensor | None, float]:
    """What codes are, their table if that is not known, and what values of a known one are times."""
    if weight.table is None:
        return ("int4" if weight.bits == 4 else "int8"), None, 1.0
    unit = float(weight.table[2])  # where floats of 4 bits have 1
    if torch.equal(weight.table.cpu(), torch.cat((_E2M1, -_E2M1)) * unit):
        return "e2m1", None, unit
    return "table", weight.table, 1.0


def _by_group(values: Tensor, repeats: int, group: int, size_in: int) -> Tensor:
    """Numbers (size_out, groups) as kernels read them: (groups, size_out) float16, for whole blocks of inputs."""
    if repeats > 1:
        values = values.repeat_interleave(repeats, 1)
    groups = -(-(-(-size_in // _BLOCK) * _BLOCK) // group)
    return F.pad(values, (0, groups - values.shape[1])).half().T.contiguous()


def _units(codes: Tensor, bits: int) -> Tensor:
    """Codes of a `GroupedWeight` as kernels read them: (size_out / 64, units, 64, 64) uint8."""
    size_out, width = codes.shape
    width += -width % (_BLOCK * bits // 8)
    units = torch.empty((-(-size_out // _UNIT), width // _UNIT, _UNIT, _UNIT), dtype=torch.uint8, device=codes.device)
    for begin in range(0, size_out, _OUTPUTS):
        part = codes[begin : begin + _OUTPUTS]
        part = F.pad(part, (0, width - part.shape[1], 0, -len(part) % _UNIT)).view(torch.uint8)
        if bits == 4:
            inputs = torch.stack((part & 15, part >> 4), 2).flatten(1).unflatten(1, (-1, 2, _UNIT))
            part = (inputs[:, :, 0] | inputs[:, :, 1] << 4).flatten(1)
        rows = part.unflatten(0, (-1, _UNIT)).unflatten(2, (-1, _UNIT)).transpose(1, 2)
        units[begin // _UNIT : begin // _UNIT + len(rows)] = rows
    return units
