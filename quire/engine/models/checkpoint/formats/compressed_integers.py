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
    check_matrix,
    check_tensor,
    input_groups,
    needed,
    packed_groups,
    read_shape,
    row_bytes,
    signed_groups,
    unpack,
)
from quire.engine.models.checkpoint.formats.stored_groups import named_groups
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredTensors
from quire.engine.models.errors import UnsupportedModel
from quire.kernels.grouped_weight import GroupedWeight

_STRATEGIES = ("tensor", "channel", "group")
_WORD = 32  # bits


class _IntegerScheme(CompressedScheme):
    """What both schemes have: scales, and the groups of inputs in their order."""

    def __init__(self, arguments: WeightArguments) -> None:
        super().__init__(arguments)
        if arguments.strategy not in _STRATEGIES:
            raise UnsupportedModel(
                f"strategy {arguments.strategy} is not supported for integers; supported are {', '.join(_STRATEGIES)}"
            )

    def part(self, module: str, name: str, stored: StoredTensors) -> Tensor:
        """A tensor of a module that is needed."""
        return needed(f"{module}.{self.tensor}", name, stored)

    def scales(self, module: str, stored: StoredTensors, size_out: int, size_in: int) -> tuple[str, Tensor]:
        """The name of the scales, and as many for each row as it has groups: (size_out, groups)."""
        name = f"{module}.weight_scale"
        scales = self.part(module, name, stored)
        check_tensor(name, scales, FLOATS)
        return name, self._rows(name, scales, size_out, size_in)

    def group_of(self, module: str, stored: StoredTensors, size_in: int) -> tuple[str | None, Tensor | None]:
        """The name of the groups of inputs, and the group of each; None: inputs of a group follow each other."""
        group = self.arguments.group
        if not self.arguments.act_order or group is None:
            return None, None
        name = f"{module}.weight_g_idx"
        group_of = self.part(module, name, stored)
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

    @override
    def read(self, module: str, stored: StoredTensors) -> NamedWeight:
        bits, group = self.arguments.bits, self.arguments.group
        name, shape_name = f"{module}.{self.tensor}", f"{module}.weight_shape"
        words = stored[name]
        size_out, size_in = read_shape(shape_name, self.part(module, shape_name, stored))
        check_tensor(name, words, (torch.int32,), (size_out, -(-size_in * bits // _WORD)))
        scales_name, scales = self.scales(module, stored, size_out, size_in)
        zeros_name, zeros = self._zeros(module, stored, size_out, size_in)
        order_name, group_of = self.group_of(module, stored, size_in)

        def read(rows: slice, columns: slice) -> GroupedWeight:
            groups = input_groups(columns, size_in, group, group_of)
            of_rows = zeros if isinstance(zeros, int) else zeros[rows]
            return packed_groups(row_bytes(words[rows]), bits, scales[rows], of_rows, groups)

        names = [other for other in (name, scales_name, shape_name, zeros_name, order_name) if other is not None]
        return named_groups(module, (size_out, size_in), read, stored, names)

    def _zeros(
        self, module: str, stored: StoredTensors, size_out: int, size_in: int
    ) -> tuple[str | None, Tensor | int]:
        """The name of the zero points, and what they are for integers from 0 on: (size_out, groups), or equal ones."""
        bits, middle = self.arguments.bits, 1 << (self.arguments.bits - 1)
        if self.arguments.symmetric:
            return None, middle
        name = f"{module}.weight_zero_point"
        zeros = self.part(module, name, stored)
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
        integers = check_matrix(name, stored[name], torch.int8)
        size_out, size_in = integers.shape
        scales_name, scales = self.scales(module, stored, size_out, size_in)
        names = [name, scales_name]
        zeros = None
        if not self.arguments.symmetric:
            zeros_name = f"{module}.weight_zero_point"
            stored_zeros = self.part(module, zeros_name, stored)
            check_tensor(zeros_name, stored_zeros, (torch.int8, torch.int32))
            zeros = self._rows(zeros_name, stored_zeros, size_out, size_in).int()
            names.append(zeros_name)
        order_name, group_of = self.group_of(module, stored, size_in)
        names += [] if order_name is None else [order_name]

        def read(rows: slice, columns: slice) -> GroupedWeight:
            groups = input_groups(columns, size_in, group, group_of)
            of_rows = None if zeros is None else zeros[rows]
            return signed_groups(integers[rows, groups.begin : groups.end], scales[rows], of_rows, groups)

        return named_groups(module, (size_out, size_in), read, stored, names)
