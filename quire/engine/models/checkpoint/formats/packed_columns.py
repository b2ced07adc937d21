"""Weights whose inputs come first, as GPTQ and AWQ store them: words of integers, zeros and scales of groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.engine.models.checkpoint.formats.integer_codes import (
    FLOATS,
    check_groups,
    check_matrix,
    check_tensor,
    input_groups,
    integer_groups,
    needed,
    packed_groups,
    row_bytes,
    unpack,
)
from quire.engine.models.checkpoint.formats.stored_groups import named_groups
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredTensors
from quire.engine.models.errors import BrokenFolder
from quire.kernels.grouped_weight import GroupedWeight

CODES = "qweight"  # what a module calls the tensor with its integers
PARTS = frozenset({"qzeros", "scales", "g_idx"})  # those beside it
_WORD = 32  # bits
_AWQ_BITS = 4
_AWQ_WORD = _WORD // _AWQ_BITS
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs in words, the lowest bits first


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How the weight of a module is packed.

    Attributes:
        bits: of an integer.
        group: inputs that share a scale; None: all.
        less: what zeros are less than they stand for, as GPTQ stores them (version 1).
        symmetric: whether zeros may be missing: they are in the middle then.
    """

    bits: int
    group: int | None
    less: int = 0
    symmetric: bool = False


def read_gptq(module: str, stored: StoredTensors, layout: PackedLayout) -> NamedWeight:
    """A weight as GPTQ's tools store it: words along inputs, zeros along outputs, and the group of each input.

    Raises:
        BrokenFolder: a tensor is missing, or its shape does not fit.
    """
    bits, first = layout.bits, f"{module}.{CODES}"
    names = [f"{module}.qzeros", f"{module}.scales"]
    words = check_matrix(first, stored[first], torch.int32)
    zeros, scales = (needed(first, name, stored) for name in names)
    size_in, size_out = words.shape[0] * _WORD // bits, words.shape[1]
    group_of, name = None, f"{module}.g_idx"
    if name in stored:
        names.append(name)
        group_of = stored[name]
        if group_of.dim() == 1 and -(-len(group_of) * bits // _WORD) == len(words):
            size_in = len(group_of)  # the last word is not full
    groups = 1 if layout.group is None else -(-size_in // layout.group)
    check_tensor(names[1], scales, FLOATS, (groups, size_out))
    check_tensor(names[0], zeros, (torch.int32,), (groups, -(-size_out * bits // _WORD)))
    if group_of is not None:
        check_groups(name, group_of, size_in, groups)
        group_of = _used(group_of)

    def read(rows: slice, columns: slice) -> GroupedWeight:
        inputs = input_groups(columns, size_in, layout.group, group_of)
        step = _WORD // math.gcd(bits, _WORD)  # integers that fill words
        start, end = inputs.begin // step, -(-inputs.end // step)
        width = step * bits // _WORD
        data = row_bytes(words[start * width : end * width, rows].mT)
        inputs = replace(inputs, begin=inputs.begin - start * step, end=inputs.end - start * step)
        begin, stop, _ = rows.indices(size_out)
        of_rows = unpack(row_bytes(zeros), bits, begin, stop).mT + layout.less & (1 << bits) - 1
        return packed_groups(data, bits, scales[:, rows].mT, of_rows, inputs)

    return named_groups(module, (size_out, size_in), read, stored, [first, *names])


def _used(group_of: Tensor) -> Tensor | None:
    """The group of each input; None: those of a group follow each other, and the file does not say so."""
    return group_of.clone() if bool(group_of.any()) else None


def read_awq(module: str, stored: StoredTensors, layout: PackedLayout) -> NamedWeight:
    """A weight for AWQ's kernel "gemm": words along outputs, of which each eight are not in their order.

    Raises:
        BrokenFolder: a tensor is missing, or its shape does not fit.
    """
    bits, first = layout.bits, f"{module}.{CODES}"
    words = check_matrix(first, stored[first], torch.int32)
    size_in, size_out = words.shape[0], words.shape[1] * _WORD // bits
    groups = 1 if layout.group is None else -(-size_in // layout.group)
    names = [f"{module}.scales"]
    scales = needed(first, names[0], stored)
    check_tensor(names[0], scales, FLOATS, (groups, size_out))
    zeros = _awq_zeros(module, stored, layout, names)
    if zeros is not None:
        check_tensor(names[1], zeros, (torch.int32,), (groups, words.shape[1]))

    def read(rows: slice, columns: slice) -> GroupedWeight:
        inputs = input_groups(columns, size_in, layout.group)
        integers = _awq_integers(words[inputs.begin : inputs.end], bits, rows)
        of_rows = 1 << bits - 1 if zeros is None else _awq_integers(zeros, bits, rows)
        return integer_groups(integers, bits, scales[:, rows].mT, of_rows, inputs)

    return named_groups(module, (size_out, size_in), read, stored, [first, *names])


def _awq_integers(words: Tensor, bits: int, rows: slice) -> Tensor:
    """Some outputs of words (n, words): (outputs, n) uint8."""
    begin, end, _ = rows.indices(words.shape[1] * _WORD // bits)
    step = _WORD // math.gcd(bits, _WORD)  # integers that fill words
    start, stop, width = begin // step, -(-end // step), step * bits // _WORD
    data = row_bytes(words[:, start * width : stop * width])
    integers = unpack(data, bits, 0, (stop - start) * step).unflatten(1, (-1, len(_AWQ_PLACES)))
    in_turn: Tensor = integers[..., list(_AWQ_PLACES)].flatten(1)
    return in_turn[:, begin - start * step : end - start * step].mT.contiguous()


def read_awq_gemv(module: str, stored: StoredTensors, layout: PackedLayout) -> NamedWeight:
    """A weight of 4 bits for AWQ's kernel "gemv": outputs first, scales and zeros padded.

    Raises:
        BrokenFolder: a tensor is missing, or its shape does not fit.
    """
    first = f"{module}.{CODES}"
    words = check_matrix(first, stored[first], torch.int32)
    size_out, size_in = words.shape[0], words.shape[1] * _AWQ_WORD
    groups = 1 if layout.group is None else -(-size_in // layout.group)
    names = [f"{module}.scales"]
    scales = needed(first, names[0], stored)
    _check_padded(names[0], scales, FLOATS, size_out, groups)
    zeros = _awq_zeros(module, stored, layout, names)
    if zeros is not None:
        _check_padded(names[1], zeros, (torch.int32,), size_out, -(-groups // _AWQ_WORD))

    def read(rows: slice, columns: slice) -> GroupedWeight:
        inputs = input_groups(columns, size_in, layout.group)
        middle = 1 << _AWQ_BITS - 1
        of_rows = middle if zeros is None else unpack(row_bytes(zeros[rows]), _AWQ_BITS, 0, groups)
        return packed_groups(row_bytes(words[rows]), _AWQ_BITS, scales[rows], of_rows, inputs)

    return named_groups(module, (size_out, size_in), read, stored, [first, *names])


def _awq_zeros(module: str, stored: StoredTensors, layout: PackedLayout, names: list[str]) -> Tensor | None:
    """The zeros of a module, whose name is added to `names`; None: all are in the middle."""
    name = f"{module}.qzeros"
    if layout.symmetric and name not in stored:
        return None
    names.append(name)
    return needed(f"{module}.{CODES}", name, stored)


def _check_padded(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], rows: int, columns: int) -> None:
    check_tensor(name, tensor, dtypes)
    if tensor.dim() != 2 or len(tensor) != rows or tensor.shape[1] < columns:
        raise BrokenFolder(
            f"{name} has shape {tuple(tensor.shape)}, but the tensors beside it need ({rows}, {columns}), or more "
            "columns"
        )
