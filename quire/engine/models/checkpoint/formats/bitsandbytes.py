"""Checkpoints of bitsandbytes: NF4 and FP4 in blocks of the flattened weight, and int8 with a scale for each row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.checkpoint.formats.integer_codes import (
    check_matrix,
    check_tensor,
    input_groups,
    needed,
    signed_groups,
)
from quire.engine.models.checkpoint.formats.stored_groups import named_groups
from quire.engine.models.checkpoint.formats.weight_format import (
    NamedWeight,
    StoredTensors,
    StoredWeight,
    WeightFormat,
    Window,
    groups_of,
)
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.kernels.grouped_weight import GroupedWeight

_WEIGHT, _SCALES = "weight", "SCB"
_KINDS = ("nf4", "fp4")
_STATE = "quant_state.bitsandbytes__"
_MAPS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_PARTS = tuple(f".{_WEIGHT}.{name}" for name in (*_MAPS, *(_STATE + kind for kind in _KINDS)))
_INT8_PARTS = (f".{_SCALES}", f".{_WEIGHT}_format")
_BLOCKS = tuple(32 << shift for shift in range(8))  # 32 to 4096
_TABLE, _NESTED_TABLE = 16, 256
_LARGEST = 127  # integer of a row
_MAX_STATE = 1 << 16  # bytes


class BitsAndBytes(WeightFormat):
    """Which modules are quantized is seen by their tensors, and how by the state beside each."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        """`section`: the config's `quantization_config`.

        Raises:
            UnsupportedModel: it has a type of 4 bits that is not accepted.
        """
        kind = section.get("bnb_4bit_quant_type", _KINDS[0])
        if section.get("load_in_4bit") and kind not in _KINDS:
            raise UnsupportedModel(
                f"quantization_config: bnb_4bit_quant_type {kind!r} is not supported; supported are {', '.join(_KINDS)}"
            )

    @override
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        module, _, tensor = name.rpartition(".")
        if tensor != _WEIGHT:
            return None
        for kind in _KINDS:
            if (state := f"{name}.{_STATE}{kind}") in stored:
                return _read_blocks(module, state, stored)
        if f"{name}.absmax" in stored or stored[name].dtype == torch.uint8:
            raise BrokenFolder(f"{name} cannot be dequantized: {name}.{_STATE}{_KINDS[0]} is missing")
        if stored[name].dtype == torch.int8:
            return _read_rows(module, stored)
        return None

    @override
    def is_part(self, name: str, stored: StoredTensors) -> bool:
        return name.endswith((*_PARTS, *_INT8_PARTS))


def _read_rows(module: str, stored: StoredTensors) -> NamedWeight:
    """A weight of int8 whose rows have the largest value that they stand for: integer * value / 127."""
    name, scales_name = f"{module}.{_WEIGHT}", f"{module}.{_SCALES}"
    integers = check_matrix(name, stored[name], torch.int8)
    size_out, size_in = integers.shape
    largest = needed(name, scales_name, stored)
    check_tensor(scales_name, largest, (torch.float32,), (size_out,), (size_out, 1))
    layout = f"{module}.{_WEIGHT}_format"
    if layout in stored and bool(stored[layout].any()):
        values = stored[layout]
        raise UnsupportedModel(f"{layout} is {values[values != 0][0].item()}, but only rows (0) are supported")

    def read(rows: slice, columns: slice) -> GroupedWeight:
        groups = input_groups(columns, size_in, None)
        scales = largest.reshape(-1, 1)[rows] / _LARGEST
        return signed_groups(integers[rows, groups.begin : groups.end], scales, None, groups)

    return named_groups(module, (size_out, size_in), read, stored, [name, scales_name])


@dataclass(frozen=True, slots=True)
class _State:
    """What a checkpoint says of a weight of 4 bits.

    Attributes:
        shape: (size_out, size_in).
        block: values of the flattened weight that share a scale.
        nested_block: scales that share one; None: they are not quantized.
        offset: of quantized scales.
    """

    shape: tuple[int, int]
    block: int
    nested_block: int | None
    offset: float


def _read_state(name: str, data: Tensor) -> _State:
    """Read the JSON in a tensor.

    Raises:
        BrokenFolder: it says something else, or of a weight that is no matrix.
    """
    try:
        check_tensor(name, data, (torch.uint8,))
        if data.numel() > _MAX_STATE:
            raise ValueError(f"it has {data.numel()} bytes")
        values = json.loads(bytes(data.flatten().tolist()))
        shape, block, nested = values["shape"], values["blocksize"], values.get("nested_blocksize")
        offset = float(values.get("nested_offset", 0.0))
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
            raise ValueError(f"shape must be two positive integers, not {shape!r}")
        for size in (block, *(() if nested is None else (nested,))):
            if type(size) is not int or size not in _BLOCKS:
                raise ValueError(
                    f"blocks must be of {_BLOCKS[0]} to {_BLOCKS[-1]} values, a power of two, not {size!r}"
                )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenFolder(f"{name} cannot be used: {error}") from error
    return _State((shape[0], shape[1]), block, nested, offset)


def _read_blocks(module: str, state_name: str, stored: StoredTensors) -> NamedWeight:
    """A weight of 4 bits: value of the table * scale of the block. The upper half of a byte comes first."""
    first = f"{module}.{_WEIGHT}"
    state = _read_state(state_name, stored[state_name])
    (size_out, size_in), block = state.shape, state.block
    data = stored[first].contiguous().view(torch.uint8).flatten()
    if len(data) != -(-size_out * size_in // 2):
        raise BrokenFolder(
            f"{first} has {len(data)} bytes, but a weight of {size_out} x {size_in} in {state_name} needs "
            f"{-(-size_out * size_in // 2)}"
        )
    names = [f"{first}.{part}" for part in _MAPS[: 2 if state.nested_block is None else 4]]
    scales = _Scales([needed(first, name, stored) for name in names], state)
    scales.check(names, -(-size_out * size_in // block))
    table = stored[names[1]].float()
    names = [first, *names, state_name]
    if size_in % 2 or (size_in % block and block % size_in):
        weight = _FlatWeight(data, scales, table, state)
        return NamedWeight(first, weight, tuple(names[1:]))
    group = min(block, size_in)

    def read(rows: slice, columns: slice) -> GroupedWeight:
        groups = groups_of(columns, group, size_in)
        begin, end, _ = columns.indices(size_in)
        codes = data.view(size_out, -1)[rows, begin // 2 : end // 2]
        elements = torch.arange(size_out)[rows, None] * size_in + torch.arange(groups.start, groups.stop) * group
        return GroupedWeight(codes >> 4 | codes << 4, scales.at(elements // block), table=table)

    return named_groups(module, state.shape, read, stored, names)


@dataclass(frozen=True, slots=True)
class _Scales:
    """The scales of blocks.

    Attributes:
        tensors: the scales, and what is not of them; with quantized scales also their scales and their values.
    """

    tensors: list[Tensor]
    state: _State

    def check(self, names: list[str], count: int) -> None:
        """Check dtypes and sizes. `count`: blocks of the weight.

        Raises:
            BrokenFolder: there is another one.
        """
        nested = self.state.nested_block
        check_tensor(names[0], self.tensors[0], (torch.float32 if nested is None else torch.uint8,), (count,))
        check_tensor(names[1], self.tensors[1], (torch.float32,), (_TABLE,))
        if nested is not None:
            check_tensor(names[2], self.tensors[2], (torch.float32,), (-(-count // nested),))
            check_tensor(names[3], self.tensors[3], (torch.float32,), (_NESTED_TABLE,))

    def at(self, blocks: Tensor) -> Tensor:
        """Those of some blocks."""
        scales, nested = self.tensors[0][blocks], self.state.nested_block
        if nested is None:
            return scales
        return self.tensors[3][scales.int()] * self.tensors[2][blocks // nested] + self.state.offset


@dataclass(frozen=True, slots=True)
class _FlatWeight(StoredWeight):
    """A weight whose rows are not made of whole blocks, nor blocks of whole rows."""

    data: Tensor
    scales: _Scales
    table: Tensor
    state: _State
    window: Window = ()

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.state.shape

    @override
    def part(self, window: Window) -> Self:
        return replace(self, window=window)

    @override
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        size_out, size_in = self.state.shape
        count = size_out * size_in
        codes = torch.stack((self.data >> 4, self.data & 15), 1).flatten()[:count]
        scales = self.scales.at(torch.arange(-(-count // self.state.block)))
        weight: Tensor = self.table[codes.int()] * scales.repeat_interleave(self.state.block)[:count]
        return weight.view(size_out, size_in)[tuple(self.window)].to(dtype)
