"""Checkpoints of HQQ, in safetensors as transformers writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.checkpoint.formats.integer_codes import (
    FLOATS,
    check_tensor,
    input_groups,
    integer_groups,
    needed,
    read_shape,
)
from quire.engine.models.checkpoint.formats.stored_groups import StoredGroups
from quire.engine.models.checkpoint.formats.weight_format import (
    NamedWeight,
    StoredTensors,
    StoredWeight,
    WeightFormat,
    Window,
)
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.kernels.grouped_weight import GroupedWeight

_CODES = "W_q"
_TENSORS = ("scale", "zero", "shape", "axis", "packing")  # those that are read beside the codes
_OPTIONS = frozenset(
    {"nbits", "group_size", "channel_wise", "optimize", "round_zero", "view_as_float", "unpack_view_dtype"}
    | {"quant_zero", "quant_scale", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config"}
)
_REFUSED = ("zero_q", "scale_q", "zero_scale")  # scales or zeros that are quantized or packed themselves
# By packing: bits of an integer, and what holds several.
_PACKINGS = {
    "8bit_u8": (8, torch.uint8),
    "4bit_u8": (4, torch.uint8),
    "3bit_32": (3, torch.int32),
    "2bit_u8": (2, torch.uint8),
    "1bit_u8": (1, torch.uint8),
}


class Hqq(WeightFormat):
    """Integers in groups whose scales and zeros are floating point.

    All that the config says is beside each weight, too.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        """`section`: the config's `quantization_config`."""

    @override
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        module, _, tensor = name.rpartition(".")
        if tensor != _CODES:
            return None
        for refused in _REFUSED:
            if f"{module}.{refused}" in stored:
                raise UnsupportedModel(f"{module}.{refused}: quantized scales and zeros of HQQ are not supported")
        names = tuple(f"{module}.{part}" for part in _TENSORS)
        scales, zeros, shape, axis, packing = (needed(name, part, stored) for part in names)
        check_tensor(names[0], scales, FLOATS)
        check_tensor(names[1], zeros, FLOATS, scales.shape)
        if axis.numel() != 1:
            raise BrokenFolder(f"{names[3]} has {axis.numel()} values, not 1")
        integers = _PackedIntegers(stored[name], _packing(names[4], packing))
        size_out, size_in = read_shape(names[2], shape)
        integers.check(name, size_out * size_in)
        groups, remainder = divmod(size_out * size_in, max(1, scales.numel()))
        if remainder or not scales.numel():
            raise BrokenFolder(f"{names[0]} has {scales.numel()} values, which do not divide {size_out} x {size_in}")
        weight = _HqqWeight(integers, scales, zeros, (size_out, size_in), along_inputs=bool((axis == 1).all()))
        stored_bytes = stored[name].nbytes + scales.nbytes + zeros.nbytes
        return NamedWeight(f"{module}.weight", weight.in_groups(groups, stored_bytes), names)

    @override
    def is_part(self, name: str, stored: StoredTensors) -> bool:
        part = name.rpartition(".")[2]
        return part in _OPTIONS or part in _TENSORS or part in _REFUSED


@dataclass(frozen=True, slots=True)
class _PackedIntegers:
    """Integers of which the first rows have the highest bits of each byte or word."""

    data: Tensor
    packing: str

    @property
    def bits(self) -> int:
        """Of an integer."""
        return _PACKINGS[self.packing][0]

    def check(self, name: str, size: int) -> None:
        """Check that there are enough.

        Raises:
            BrokenFolder: they are too few.
        """
        bits, holder = _PACKINGS[self.packing]
        available = self.data.nbytes // holder.itemsize * (holder.itemsize * 8 // bits)
        if self.data.dim() != 2 or available < size:
            raise BrokenFolder(
                f"{name} has shape {tuple(self.data.shape)} and {available} integers, but the weight needs {size}"
            )

    def unpacked(self) -> Tensor:
        """All integers, and those that fill the last word: (rows, columns) uint8."""
        bits, holder = _PACKINGS[self.packing]
        data = self.data.contiguous().view(holder)  # it may be stored as floating point
        shifts = range(holder.itemsize * 8 // bits * bits - bits, -1, -bits)
        return torch.cat([(data >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts])


@dataclass(frozen=True, slots=True)
class _HqqWeight(StoredWeight):
    """A weight (integer - zero) * scale.

    Attributes:
        integers: of groups of equal size: a row each if they lie along inputs, otherwise a column each.
        scales, zeros: of each group.
        size: of the weight: (size_out, size_in).
        along_inputs: whether a group has elements that follow each other in a row of the weight, or in the next one.
        window: the part of the weight that this is.
    """

    integers: _PackedIntegers
    scales: Tensor
    zeros: Tensor
    size: tuple[int, int]
    along_inputs: bool
    window: Window = ()

    def in_groups(self, group: int, stored_bytes: int) -> StoredWeight:
        """The weight as groups of inputs, if it is made of these. `group`: elements that share a scale."""
        size_out, size_in = self.size
        if not self.along_inputs or size_in % group:
            return self
        scales, zeros = (values.reshape(size_out, -1) for values in (self.scales, self.zeros))

        def read(rows: slice, columns: slice) -> GroupedWeight:
            groups = input_groups(columns, size_in, group)
            integers = self.integers.unpacked().flatten()[: size_out * size_in].view(self.size)[rows]
            integers = integers[:, groups.begin : groups.end]
            return integer_groups(integers, self.integers.bits, scales[rows], zeros[rows], groups)

        return StoredGroups(size_out, size_in, read, stored_bytes)

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.size

    @override
    def part(self, window: Window) -> Self:
        return replace(self, window=window)

    @override
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        size_out, size_in = self.size
        count = self.scales.numel()
        rows, columns = (count, -1) if self.along_inputs else (-1, count)
        integers = self.integers.unpacked().flatten()[: size_out * size_in].view(rows, columns).float()
        each = (-1, 1) if self.along_inputs else (1, -1)
        weight = (integers - self.zeros.float().reshape(each)) * self.scales.float().reshape(each)
        return weight.view(size_out, size_in)[tuple(self.window)].to(dtype)


def _packing(name: str, packing: Tensor) -> str:
    text = bytes(packing.flatten().tolist()).decode("latin-1") if packing.dtype == torch.uint8 else ""
    if text not in _PACKINGS:
        raise UnsupportedModel(f"{name}: {text!r} is not supported; supported are {', '.join(_PACKINGS)}")
    return text
