"""Schemes of integers in compressed-tensors: packed in words of 32 bits, or a byte each."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.checkpoint.formats.compressed_scheme import CompressedScheme, WeightArguments
from quire.engine.models.checkpoint.formats.integer_codes import (
    FLOATS,
    check_groups,
    check_tensor,
    input_groups,
    packed_groups,
    row_bytes,
    signed_groups,
    unpack,
)
from quire.engine.models.checkpoint.formats.stored_groups import StoredGroups
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredTensors
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.kernels.grouped_weight import GroupedWeight

_STRATEGIES = ("tensor", "channel", "group")
_PACKED_BITS = (2, 4, 8)
_WORD = 32
_ALL = slice(None)


class _IntegerScheme(CompressedScheme):
    """What both schemes have: scales, and the groups of inputs in their order."""

    def __init__(self, arguments: WeightArguments) -> None:
        super().__init__(arguments)
        if arguments.strategy not in _STRATEGIES:
            raise UnsupportedModel(
                f"strategy {arguments.strategy} is not supported for integers; supported are {', '.join(_STRATEGIES)}"
            )

    def scales(self, module: str, stored: StoredTensors, size_out: int, size_in: int) -> tuple[str, Tensor]:
        """The name of the scales, and as many for each row as it has groups: (size_out, groups)."""
        name = self.needed(module, "weight_scale", stored)
        scales = stored[name]
        check_tensor(name, scales, FLOATS)
        return name, self._rows(name, scales, size_out, size_in)

    def group_of(self, module: str, stored: StoredTensors, size_in: int) -> tuple[str | None, Tensor | None]:
        """The name of the groups of inputs, and the group of each; None: inputs of a group follow each other."""
        group = self.arguments.group
        if not self.arguments.act_order or group is None:
            return None, None
        name = self.needed(module, "weight_g_idx", stored)
        group_of = stored[name]
        if bool((group_of == -1).all()):  # the order was not used
            return None, None
        check_groups(name, group_of, size_in, -(-size_in // group))
        return name, group_of.clone()

    def _rows(self, name: str, values: Tensor, size_out: int, size_in: int) -> Tensor:
        group = self.arguments.group
        groups = 1 if group is None else -(-size_in // group)
        if values.numel() == 1 and groups == 1:
            return values.reshape(1, 1).expand(size_out, 1)
        check_tensor(name, values, (values.dtype,), (size_out, groups), *([(size_out,)] if groups == 1 else []))
        return values.reshape(size_out, groups)


class PackQuantized(_IntegerScheme):
    """Integers from -2^(bits - 1) on, that are stored from 0 on in words of 32 bits, and so are zero points."""

    tensor: ClassVar[str] = "weight_packed"

    def __init__(self, arguments: WeightArguments) -> None:
        super().__init__(arguments)
        if arguments.bits not in _PACKED_BITS:
            accepted = ", ".join(map(str, _PACKED_BITS))
            raise UnsupportedModel(f"packed integers of {arguments.bits} bits are not supported, only {accepted}")

    @override
    def read(self, module: str, stored: StoredTensors) -> NamedWeight:
        bits, group = self.arguments.bits, self.arguments.group
        name, shape_name = f"{module}.{self.tensor}", self.needed(module, "weight_shape", stored)
        words = stored[name]
        size_out, size_in = _shape(shape_name, stored[shape_name])
        check_tensor(name, words, (torch.int32,), (size_out, -(-size_in * bits // _WORD)))
        scales_name, scales = self.scales(module, stored, size_out, size_in)
        zeros_name, zeros = self._zeros(module, stored, size_out, size_in)
        order_name, group_of = self.group_of(module, stored, size_in)

        def read(rows: slice, columns: slice) -> GroupedWeight:
            groups = input_groups(columns, size_in, group, group_of)
            of_rows = zeros if isinstance(zeros, int) else zeros[rows]
            return packed_groups(row_bytes(words[rows]), bits, scales[rows], of_rows, groups)

        names = [other for other in (scales_name, shape_name, zeros_name, order_name) if other is not None]
        stored_bytes = words.nbytes + sum(stored[other].nbytes for other in names)
        return NamedWeight(f"{module}.weight", StoredGroups(size_out, size_in, read, stored_bytes), tuple(names))

    def _zeros(
        self, module: str, stored: StoredTensors, size_out: int, size_in: int
    ) -> tuple[str | None, Tensor | int]:
        """The name of the zero points, and what they are for integers from 0 on: (size_out, groups), or all the same."""
        bits, middle = self.arguments.bits, 1 << (self.arguments.bits - 1)
        if self.arguments.symmetric:
            return None, middle
        name = self.needed(module, "weight_zero_point", stored)
        zeros = stored[name]
        check_tensor(name, zeros, (torch.int32, torch.int8))
        if zeros.dtype == torch.int8:  # they are not packed
            return name, self._rows(name, zeros, size_out, size_in).int() + middle
        groups = 1 if self.arguments.group is None else -(-size_in // self.arguments.group)
        check_tensor(name, zeros, (torch.int32,), (-(-size_out * bits // _WORD), groups))
        return name, unpack(row_bytes(zeros.mT), bits, 0, size_out).mT


class IntQuantized(_IntegerScheme):
    """Integers that take a byte each, with scales. How activations were quantized does not matter."""

    @override
    def read(self, module: str, stored: StoredTensors) -> NamedWeight:
        name, group = f"{module}.{self.tensor}", self.arguments.group
        integers = stored[name]
        check_tensor(name, integers, (torch.int8,))
        if integers.dim() != 2:
            raise BrokenFolder(f"{name} has shape {tuple(integers.shape)}, but a weight has two dimensions")
        size_out, size_in = integers.shape
        scales_name, scales = self.scales(module, stored, size_out, size_in)
        names = [scales_name]
        zeros = None
        if not self.arguments.symmetric:
            zeros_name = self.needed(module, "weight_zero_point", stored)
            check_tensor(zeros_name, stored[zeros_name], (torch.int8, torch.int32))
            zeros = self._rows(zeros_name, stored[zeros_name], size_out, size_in).int()
            names.append(zeros_name)
        order_name, group_of = self.group_of(module, stored, size_in)
        names += [] if order_name is None else [order_name]

        def read(rows: slice, columns: slice) -> GroupedWeight:
            groups = input_groups(columns, size_in, group, group_of)
            of_rows = None if zeros is None else zeros[rows]
            return signed_groups(integers[rows, groups.begin : groups.end], scales[rows], of_rows, groups)

        stored_bytes = integers.nbytes + sum(stored[other].nbytes for other in names)
        return NamedWeight(name, StoredGroups(size_out, size_in, read, stored_bytes), tuple(names))


def _shape(name: str, shape: Tensor) -> tuple[int, int]:
    check_tensor(name, shape, (torch.int32, torch.int64), (2,))
    size_out, size_in = shape.tolist()
    if min(size_out, size_in) < 1:
        raise BrokenFolder(f"{name} is {size_out} x {size_in}, but sizes are at least 1")
    return size_out, size_in
