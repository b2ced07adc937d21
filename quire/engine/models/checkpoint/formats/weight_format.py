"""WeightFormat: the interface between a checkpoint's tensors and the weights of layers.

A checkpoint asks its formats which tensors make one weight. A weight of such a format is cut to what a rank has of it,
then given to its layer as it is if a kernel reads its format; otherwise it is dequantized.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from quire.engine.models.errors import UnsupportedModel
from quire.kernels.linear import PackedWeight, Quantization

# The part of each dimension of a weight that is wanted; of dimensions that are left out, all.
Window = Sequence[slice]
# The tensors of a checkpoint by name: views of its files, of which nothing is read before it is used.
StoredTensors = Mapping[str, Tensor]


class StoredWeight(ABC):
    """A weight as a checkpoint stores it, or a part of one."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantized weight: (size_out, size_in), or as the model's family has it."""

    @abstractmethod
    def part(self, window: Window) -> Self:
        """A part of a whole weight.

        Raises:
            UnsupportedModel: a border is inside of a group; see `groups_of`.
        """

    @abstractmethod
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The numbers that the weight stands for.

        Raises:
            RuntimeError, ValueError, IndexError, TypeError: shapes or dtypes of its tensors do not match.
        """


class PackableWeight(StoredWeight):
    """A weight in a format that some kernel reads, so that layers keep it as it is stored."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the checkpoint that the weight takes."""

    @abstractmethod
    def is_finite(self) -> bool:
        """Whether there are neither NaN nor infinite values among what it stands for."""

    @abstractmethod
    def copied(self) -> Self:
        """The weight with tensors of its own: those of a checkpoint are valid until the next one is read."""

    @abstractmethod
    def can_pack(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a kernel of the device reads the format. `dtype`: of the products."""

    @classmethod
    @abstractmethod
    def pack(cls, parts: Sequence[Self], dtype: torch.dtype, device: torch.device) -> PackedWeight | None:
        """The weight of a linear layer as a kernel reads it.

        Args:
            parts: (size_out, size_in) each, of the same size_in; their rows follow each other.
            dtype: of the products.
            device: where the weight is to be.

        Returns:
            None if the parts differ, so that no kernel reads all of them: they are dequantized then.
        """


class StackedWeight(StoredWeight):
    """The weights of a layer's experts in one: (experts, size_in, size_out)."""

    @abstractmethod
    def experts(self) -> Sequence[PackableWeight] | None:
        """The weight (size_out, size_in) of each expert; None: they are dequantized.

        That is where a border is inside of a group.
        """


class NamedWeight(NamedTuple):
    """A weight and its name in a checkpoint of plain weights. `tensors`: names of its tensors after the first."""

    name: str
    weight: StoredWeight
    tensors: tuple[str, ...]


class WeightFormat(ABC):
    """How a checkpoint stores weights of more than one tensor. A format is made from the config's quantization section.

    To add one: a module in this package, and its method in `FORMATS`.
    """

    def use_metadata(self, metadata: Mapping[str, str]) -> None:
        """Take what the metadata of files say of weights, by their names, before any weight is read."""
        del metadata  # most formats need none

    @abstractmethod
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        """The weight whose first tensor is `name`; None if this format has none there.

        Raises:
            BrokenFolder: a tensor of the weight is missing, or does not fit to the others.
        """

    @abstractmethod
    def is_part(self, name: str, stored: StoredTensors) -> bool:
        """Whether a tensor is read with the first one of a weight, such as scales, or is not needed at all."""

    def requantized(self, quantization: Quantization) -> Quantization:
        """The quantization of dequantized weights that loses least, of those that are as good as the one asked for."""
        return quantization


def groups_of(elements: slice, group: int, size: int) -> slice:
    """The groups of some elements of a dimension of `size` elements, in which `group` elements share a scale.

    Raises:
        UnsupportedModel: they begin or end inside of a group.
    """
    begin, end, _ = elements.indices(size)
    if begin % group or (end % group and end != size):
        raise UnsupportedModel(
            f"a rank has inputs {begin} to {end}, but {group} of them share a scale: "
            "use a --tensor-parallel-size that divides the groups"
        )
    return slice(begin // group, -(-end // group))
