"""GroupedWeight: weights of 4 or 8 bits whose groups of inputs share a scale, as formats give them to kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_HALF_EXPONENT = 15  # of two, below which float16 has all numbers


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight (size_out, size_in): value(code) * scale + minimum, with a scale and a minimum for each group of inputs.

    Attributes:
        codes: of 8 bits, (size_out, size_in) int8; of 4 bits, (size_out, size_in / 2) uint8, the lower half of a byte
            belonging to the input of the even index.
        scales: (size_out, groups) float32. All groups have size_in / groups inputs.
        minimums: (size_out, groups) float32; None: 0.
        table: (16,) float32 values of the codes of 4 bits; None: codes stand for themselves, that is for 0 to 15.
        order: (size_in,) int64, the layer's input that each input of the weight belongs to; None: they are the same.
        six_bits: codes of 8 bits are from -32 to 31, as are those of all weights that may take its place.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    table: Tensor | None = None
    order: Tensor | None = None
    six_bits: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """(size_out, size_in)."""
        return len(self.codes), self.codes.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        tensors = self.codes, self.scales, self.minimums, self.table, self.order
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def is_finite(self) -> bool:
        """Whether there are neither NaN nor infinite values among what it stands for."""
        tensors = self.scales, self.minimums, self.table
        return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None)

    def values(self) -> Tensor:
        """The values of the codes: (size_out, size_in) float32."""
        if self.bits == 8:
            return self.codes.float()
        codes = torch.stack((self.codes & 15, self.codes >> 4), 2).flatten(1)
        values: Tensor = codes.float() if self.table is None else self.table[codes.int()]
        return values

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The numbers that the weight stands for: (size_out, size_in), in the order of the layer's inputs."""
        weight: Tensor = self.values().unflatten(1, (-1, self.group)) * self.scales[..., None]
        if self.minimums is not None:
            weight += self.minimums[..., None]
        weight = weight.flatten(1)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order, weight)
        return weight.to(dtype)

    def times(self, factor: float) -> GroupedWeight:
        """The weight multiplied by a number."""
        return replace(
            self, scales=self.scales * factor, minimums=None if self.minimums is None else self.minimums * factor
        )

    def copied(self) -> GroupedWeight:
        """The weight with tensors of its own."""
        return replace(
            self,
            codes=self.codes.clone(),
            scales=self.scales.clone(),
            minimums=None if self.minimums is None else self.minimums.clone(),
        )


def joined(parts: Sequence[GroupedWeight]) -> GroupedWeight | None:
    """The weight whose rows are those of all parts; None if these differ in more than that."""
    first = parts[0]
    if any(not alike(first, part) for part in parts[1:]):
        return None
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return GroupedWeight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minimums) if minimums else None,
        first.table,
        first.order,
    )


def alike(first: GroupedWeight, second: GroupedWeight) -> bool:
    """Whether two weights differ in their rows alone, so that they can be `joined`."""
    return (
        first.codes.dtype == second.codes.dtype
        and first.shape[1] == second.shape[1]
        and first.group == second.group
        and (first.minimums is None) == (second.minimums is None)
        and same_tensors(first.table, second.table)
        and same_tensors(first.order, second.order)
    )


def same_tensors(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether two tensors are equal, or neither is there."""
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def checked_order(order: Tensor, size_in: int) -> Tensor:
    """An order of inputs as it is, for kernels that do not check it.

    Raises:
        ValueError: it is none.
    """
    if order.shape != (size_in,) or not torch.equal(order.sort().values, torch.arange(size_in, device=order.device)):
        raise ValueError(f"the order of a weight's inputs is not one of {size_in} inputs")
    return order


def common_zero(scales: Tensor, minimums: Tensor | None) -> int | None:
    """The code that stands for 0 in all groups; None if there is none."""
    if minimums is None:
        return 0
    used = scales != 0
    ratios = -minimums[used][:1] / scales[used][:1]
    zero = round(float(ratios)) if len(ratios) and abs(float(ratios)) < 256 else 0
    close = (minimums + zero * scales).abs() <= 1e-6 * max(1, abs(zero)) * scales.abs()
    return zero if bool(close.all()) else None


def row_powers(levels: Sequence[Tensor]) -> Tensor:
    """The powers of two by which rows of scales, or of several levels, are divided to be float16: (rows,) float32."""
    largest = torch.stack([values.abs().amax(1) for values in levels]).amax(0)
    exponents = torch.where(largest > 0, largest.frexp().exponent - _HALF_EXPONENT, 0).clamp(-100, 100)
    return exponents.float().exp2()
