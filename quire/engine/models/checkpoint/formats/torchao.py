"""Checkpoints of torchao: weights of which safetensors hold the data, and the files' metadata what they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.checkpoint.formats.integer_codes import (
    FLOATS,
    check_matrix,
    check_tensor,
    input_groups,
    needed,
    signed_groups,
)
from quire.engine.models.checkpoint.formats.stored_groups import named_groups
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredTensors, WeightFormat
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.kernels.grouped_weight import GroupedWeight

_CODES, _SCALES, _ZEROS, _FACTORS = "_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_act_pre_scale"
_PARTS = frozenset({_SCALES, _ZEROS, _FACTORS, "_weight_act_scale"})
_PACKED = "Int4Tensor"
_UNPACKED = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
_SIGNS = 0x88  # the signs of two integers of 4 bits


class TorchAO(WeightFormat):
    """Integers of 4 bits in pairs, or of up to 8 bits in bytes."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        """`section`: the config's `quantization_config`."""
        self._metadata: Mapping[str, str] = {}

    @override
    def use_metadata(self, metadata: Mapping[str, str]) -> None:
        self._metadata = metadata

    @override
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        module, _, tensor = name.rpartition(".")
        if tensor != _CODES:
            return None
        weight = f"{module}.weight"
        kind, block = _description(weight, self._metadata.get(weight))
        if f"{module}.{_FACTORS}" in stored:
            raise UnsupportedModel(f"{module}.{_FACTORS}: factors of inputs are not supported with torchao")
        if kind == _PACKED:
            return _read_packed(module, stored, block)
        if kind in _UNPACKED:
            return _read_unpacked(module, stored, block)
        accepted = ", ".join((_PACKED, *_UNPACKED))
        raise UnsupportedModel(f"{weight} is a {kind} of torchao, which is not supported; supported are {accepted}")

    @override
    def is_part(self, name: str, stored: StoredTensors) -> bool:
        return name.rpartition(".")[2] in _PARTS


def _description(weight: str, entry: str | None) -> tuple[str, tuple[int, int]]:
    """The kind of a weight, and how many rows and columns share a scale."""
    if entry is None:
        raise BrokenFolder(f"{weight} cannot be dequantized: the metadata of the file do not say what it is")
    try:
        values = json.loads(entry)
        kind, (rows, columns) = values["_type"], values["_data"].get("block_size") or (1, 1)
        if not isinstance(kind, str) or not all(type(size) is int and size > 0 for size in (rows, columns)):
            raise TypeError(f"{kind!r} with blocks of {rows!r} x {columns!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenFolder(f"{weight} cannot be dequantized: its metadata cannot be used: {error}") from error
    return kind, (rows, columns)


def _read_packed(module: str, stored: StoredTensors, block: tuple[int, int]) -> NamedWeight:
    """A weight of 4 bits, the lower half of a byte first: integer * scale + zero."""
    name, group = f"{module}.{_CODES}", block[1]
    data = check_matrix(name, stored[name], torch.int8, torch.uint8).view(torch.uint8)
    size_out, size_in = len(data), 2 * data.shape[1]
    if block[0] != 1 or group % 2 or size_in % group:
        raise BrokenFolder(f"{name} has {size_in} inputs, which blocks of {block[0]} x {group} do not divide")
    names = [f"{module}.{_SCALES}", f"{module}.{_ZEROS}"]
    scales, zeros = (needed(name, part, stored) for part in names)
    for part, values in zip(names, (scales, zeros), strict=True):
        check_tensor(part, values, FLOATS, (size_in // group, size_out))

    def read(rows: slice, columns: slice) -> GroupedWeight:
        groups = input_groups(columns, size_in, group)
        codes = data[rows, groups.begin // 2 : groups.end // 2] ^ _SIGNS  # from 0 on
        factors, offsets = (values[groups.index][:, rows].mT.float() for values in (scales, zeros))
        return GroupedWeight(codes, factors, offsets - 8 * factors)

    return named_groups(module, (size_out, size_in), read, stored, [name, *names])


def _read_unpacked(module: str, stored: StoredTensors, block: tuple[int, int]) -> NamedWeight:
    """A weight whose integers take a byte each: (integer - zero) * scale."""
    name = f"{module}.{_CODES}"
    integers = check_matrix(name, stored[name], torch.int8)
    size_out, size_in = integers.shape
    names = [f"{module}.{_SCALES}"]
    scales = needed(name, names[0], stored)
    check_tensor(names[0], scales, FLOATS)
    height, group = block
    if scales.numel() == 1:  # an older version wrote no blocks
        height, group = size_out, size_in
    if size_out % height or size_in % group or scales.numel() != size_out // height * (size_in // group):
        raise BrokenFolder(
            f"{names[0]} has {scales.numel()} values, but {size_out} x {size_in} in blocks of {height} x {group} need "
            f"{-(-size_out // height) * -(-size_in // group)}"
        )
    zeros = stored.get(f"{module}.{_ZEROS}")
    if zeros is not None:
        names.append(f"{module}.{_ZEROS}")
        check_tensor(names[1], zeros, (*FLOATS, torch.int8, torch.int32), scales.shape)

    def of_rows(values: Tensor, rows: slice) -> Tensor:
        return values.reshape(-1, size_in // group).repeat_interleave(height, 0)[rows]

    def read(rows: slice, columns: slice) -> GroupedWeight:
        groups = input_groups(columns, size_in, group)
        offsets = None if zeros is None else of_rows(zeros, rows).float()
        return signed_groups(integers[rows, groups.begin : groups.end], of_rows(scales, rows), offsets, groups)

    return named_groups(module, (size_out, size_in), read, stored, [name, *names])
