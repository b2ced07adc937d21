"""Integers in packed words, and the weights in groups that they make with scales and zero points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.models.checkpoint.formats.weight_format import StoredTensors, groups_of
from quire.engine.models.errors import BrokenFolder
from quire.kernels.grouped_weight import GroupedWeight

FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # of scales
_HALF_BYTE = 4


@dataclass(frozen=True, slots=True)
class InputGroups:
    """Which inputs of a weight share a scale.

    Attributes:
        begin, end: the inputs.
        index: (groups,) the scale that each group has; all groups have the same number of inputs.
        order: (inputs,) the inputs in the order of their groups, counted from `begin`; None: they are in it.
    """

    begin: int
    end: int
    index: Tensor
    order: Tensor | None = None


def input_groups(columns: slice, size_in: int, group: int | None, group_of: Tensor | None = None) -> InputGroups:
    """The groups of some inputs.

    Args:
        columns: the inputs.
        size_in: inputs of the whole weight.
        group: inputs that share a scale; None: all.
        group_of: (size_in,) the group of each input; None: those of a group follow each other.

    Raises:
        UnsupportedModel: they begin or end inside of a group.
    """
    begin, end, _ = columns.indices(size_in)
    if group is None or group >= size_in:
        return InputGroups(begin, end, torch.zeros(1, dtype=torch.long))
    in_turn = torch.arange(size_in) // group
    if group_of is None or torch.equal(group_of.long(), in_turn):
        if size_in % group == 0:
            groups = groups_of(columns, group, size_in)
            return InputGroups(begin, end, torch.arange(groups.start, groups.stop))
        group_of = in_turn
    sorted_groups, order = group_of[begin:end].long().sort(stable=True)
    index, counts = sorted_groups.unique_consecutive(return_counts=True)
    size = math.gcd(*counts.tolist())
    is_in_turn = torch.equal(order, torch.arange(len(order)))
    return InputGroups(begin, end, index.repeat_interleave(counts // max(1, size)), None if is_in_turn else order)


def check_groups(name: str, group_of: Tensor, size_in: int, groups: int) -> None:
    """Check the groups of inputs.

    Raises:
        BrokenFolder: there is not one for each input, or one that has no scale.
    """
    check_tensor(name, group_of, (torch.int32, torch.int64), (size_in,))
    first, last = (int(extreme) for extreme in group_of.aminmax()) if size_in else (0, 0)
    if first < 0 or last >= groups:
        raise BrokenFolder(f"{name} has groups {first} to {last}, but the weight has scales for 0 to {groups - 1}")


def check_tensor(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], *shapes: Sequence[int]) -> None:
    """Check the dtype and the shape of a tensor, which must be one of `shapes` if there are any.

    Raises:
        BrokenFolder: it has another one.
    """
    if tensor.dtype not in dtypes:
        accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise BrokenFolder(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not {accepted}")
    if shapes and tuple(tensor.shape) not in {tuple(shape) for shape in shapes}:
        accepted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise BrokenFolder(f"{name} has shape {tuple(tensor.shape)}, but the tensors beside it need {accepted}")


def check_matrix(name: str, tensor: Tensor, *dtypes: torch.dtype) -> Tensor:
    """Check the dtype of a tensor, and that it has two dimensions; returns it.

    Raises:
        BrokenFolder: it has another one, or more or fewer.
    """
    check_tensor(name, tensor, dtypes)
    if tensor.dim() != 2:
        raise BrokenFolder(f"{name} has shape {tuple(tensor.shape)}, but a weight has two dimensions")
    return tensor


def needed(first: str, name: str, stored: StoredTensors) -> Tensor:
    """A tensor that is read with the first one of a weight.

    Raises:
        BrokenFolder: it is missing.
    """
    if name not in stored:
        raise BrokenFolder(f"{first} cannot be dequantized: {name} is missing")
    return stored[name]


def read_shape(name: str, shape: Tensor) -> tuple[int, int]:
    """Outputs and inputs of a weight, which are stored beside it.

    Raises:
        BrokenFolder: they are no sizes.
    """
    check_tensor(name, shape, (torch.int32, torch.int64), (2,))
    size_out, size_in = shape.tolist()
    if min(size_out, size_in) < 1:
        raise BrokenFolder(f"{name} is {size_out} x {size_in}, but sizes are at least 1")
    return size_out, size_in


def row_bytes(words: Tensor) -> Tensor:
    """Words (rows, words) as bytes (rows, bytes), the lowest first."""
    return words.contiguous().view(torch.uint8)


def unpack(data: Tensor, bits: int, begin: int, end: int) -> Tensor:
    """Integers from `begin` to `end` of each row: (rows, end - begin) uint8.

    Args:
        data: (rows, bytes); integers follow each other without gaps, the lowest bits first.
        bits: of an integer, 1 to 8.
        begin, end: indices.
    """
    whole = math.gcd(bits, 8)
    step, width = 8 // whole, bits // whole  # so many integers lie in so many bytes
    first, last = begin // step, -(-end // step)
    units = data[:, first * width : last * width].unflatten(1, (last - first, width))
    dtype = torch.int32 if width < 4 else torch.int64
    bits_of_units = units[..., 0].to(dtype)
    for index in range(1, width):
        bits_of_units |= units[..., index].to(dtype) << 8 * index
    shifts = torch.arange(step, dtype=dtype) * bits
    integers: Tensor = (bits_of_units[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)
    return integers[:, begin - first * step : end - first * step]


def packed_groups(data: Tensor, bits: int, scales: Tensor, zeros: Tensor | int, groups: InputGroups) -> GroupedWeight:
    """The weight (integer - zero) * scale of packed integers.

    Args:
        data: (rows, bytes), see `unpack`.
        bits: of an integer.
        scales: (rows, scales).
        zeros: (rows, scales), or one for all.
        groups: of the wanted inputs.
    """
    begin, end = groups.begin, groups.end
    if bits in (_HALF_BYTE, 8) and groups.order is None and begin * bits % 8 == end * bits % 8 == 0:
        codes = data[:, begin * bits // 8 : end * bits // 8]
        return _with_scales(codes if bits == _HALF_BYTE else _signed(codes), scales, zeros, groups)
    return integer_groups(unpack(data, bits, begin, end), bits, scales, zeros, groups)


def integer_groups(
    integers: Tensor, bits: int, scales: Tensor, zeros: Tensor | int, groups: InputGroups
) -> GroupedWeight:
    """The weight (integer - zero) * scale of integers (rows, inputs) uint8; see `packed_groups`."""
    if groups.order is not None:
        integers = integers[:, groups.order]
    if bits <= _HALF_BYTE and integers.shape[1] % 2 == 0:
        return _with_scales(integers[:, ::2] | integers[:, 1::2] << 4, scales, zeros, groups)
    return _with_scales(_signed(integers), scales, zeros, groups)


def signed_groups(integers: Tensor, scales: Tensor, zeros: Tensor | None, groups: InputGroups) -> GroupedWeight:
    """The weight (integer - zero) * scale of integers (rows, inputs) int8; see `packed_groups`."""
    if groups.order is not None:
        integers = integers[:, groups.order]
    return _with_scales(integers, scales, 128 if zeros is None else zeros + 128, groups)


def _with_scales(codes: Tensor, scales: Tensor, zeros: Tensor | int, groups: InputGroups) -> GroupedWeight:
    """`codes`: of a `GroupedWeight`; those of 8 bits are 128 less than the integers that `zeros` belong to."""
    scales = scales[:, groups.index].float()
    zeros = zeros[:, groups.index].float() if isinstance(zeros, Tensor) else torch.tensor(float(zeros))
    if codes.dtype == torch.int8:
        zeros = zeros - 128
    minimums = (-zeros * scales).contiguous() if zeros.any() else None
    return GroupedWeight(codes.contiguous(), scales.contiguous(), minimums, order=groups.order)


def _signed(integers: Tensor) -> Tensor:
    """Integers of 8 bits, less 128."""
    return (integers ^ 128).view(torch.int8)
