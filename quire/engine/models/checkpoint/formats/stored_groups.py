"""StoredGroups: weights whose values share scales in groups of inputs, whatever the tensors are that store them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, PackableWeight, StoredTensors, Window
from quire.kernels.grouped import can_pack_groups, pack_groups
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.linear import PackedWeight

# Reads rows and inputs of a weight from its tensors. Raises UnsupportedModel where a border is inside of a group, see
# `groups_of`, and what `StoredWeight.dequantize` may raise.
ReadGroups = Callable[[slice, slice], GroupedWeight]
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class StoredGroups(PackableWeight):
    """A weight (size_out, size_in) that a format reads as a `GroupedWeight`.

    Attributes:
        size_out, size_in: shape of the whole weight.
        read: reads a part of it.
        stored_bytes: bytes of its tensors in the checkpoint.
        window: the part of the weight that this is.
    """

    size_out: int
    size_in: int
    read: ReadGroups
    stored_bytes: int
    window: Window = ()

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return tuple(
            len(range(*part.indices(size)))
            for part, size in zip(self._slices(), (self.size_out, self.size_in), strict=True)
        )

    @property
    @override
    def nbytes(self) -> int:
        rows, columns = self.shape
        return self.stored_bytes * rows * columns // max(1, self.size_out * self.size_in)

    @override
    def part(self, window: Window) -> Self:
        return replace(self, window=window)

    def groups(self) -> GroupedWeight:
        """What it is as groups."""
        return self.read(*self._slices())

    def times(self, factor: float) -> Self:
        """The weight multiplied by a number."""
        return replace(self, read=lambda rows, columns: self.read(rows, columns).times(factor))

    @override
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.groups().dequantize(dtype)

    @override
    def is_finite(self) -> bool:
        return self.groups().is_finite()

    @override
    def copied(self) -> Self:
        groups = self.groups().copied()
        size_out, size_in = groups.shape
        return replace(
            self,
            size_out=size_out,
            size_in=size_in,
            read=lambda rows, columns: groups,
            stored_bytes=groups.nbytes,
            window=(),
        )

    @override
    def can_pack(self, dtype: torch.dtype, device: torch.device) -> bool:
        return can_pack_groups(dtype, device)

    @classmethod
    @override
    def pack(cls, parts: Sequence[Self], dtype: torch.dtype, device: torch.device) -> PackedWeight | None:
        return pack_groups([part.groups() for part in parts], dtype, device)

    def _slices(self) -> tuple[slice, slice]:
        rows, columns = (*self.window, _ALL, _ALL)[:2]
        return rows, columns


def named_groups(
    module: str, shape: Sequence[int], read: ReadGroups, stored: StoredTensors, names: Sequence[str]
) -> NamedWeight:
    """The weight of a module in groups. `names`: its tensors, that with the codes first."""
    size_out, size_in = shape
    stored_bytes = sum(stored[name].nbytes for name in names)
    return NamedWeight(f"{module}.weight", StoredGroups(size_out, size_in, read, stored_bytes), tuple(names[1:]))
