"""Groups: what a weight in groups of inputs needs beside codes and scales, as the Triton kernels read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """What a weight in the format "groups" needs beside codes and scales, or those of several experts need.

    Attributes:
        codes: what they are; see `quire.kernels.triton.groups`.
        group: inputs that share a scale.
        zero: the code that stands for 0 where there are no minimums.
        size_out, size_in: shape of the weight, or of each.
        dtype: of the rows that it is multiplied with.
        minimums: float16, as the scales.
        named_factors: of outputs, by the name of the layout: weights of another one that are to take its place are
            refused for want of the name.
        table: (16,) float32.
        order: (size_in,) int64, the layer's input that each input of the weight belongs to.
    """

    codes: str
    group: int
    zero: int
    size_out: int
    size_in: int
    dtype: torch.dtype
    minimums: Tensor | None
    named_factors: Mapping[str, Tensor]
    table: Tensor | None = None
    order: Tensor | None = None

    @property
    def factors(self) -> Tensor:
        """Float32, (..., size_out)."""
        (factors,) = self.named_factors.values()
        return factors

    @property
    def layout(self) -> str:
        """What has to be the same in weights that take each other's place."""
        least = f"zero {self.zero}" if self.minimums is None else "minimums"
        return f"{self.codes}, group {self.group}, {least}"

    @property
    def nbytes(self) -> int:
        """Size of its tensors in bytes."""
        tensors = self.minimums, self.factors, self.table, self.order
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)
