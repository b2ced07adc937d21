"""The convolutions before an encoder, which decide how many positions audio has."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Convolution(msgspec.Struct, frozen=True, array_like=True):
    """A convolution over columns; `padding` columns of zeros on each side."""

    kernel: int
    stride: int
    padding: int = 0


def count_positions(convolutions: Sequence[Convolution], columns: int) -> int:
    """Number of positions after the convolutions of `columns` columns of features."""
    for convolution in convolutions:
        room = columns + 2 * convolution.padding - convolution.kernel
        columns = room // convolution.stride + 1 if room >= 0 else 0
    return columns


def count_columns(convolutions: Sequence[Convolution], positions: int) -> int:
    """The smallest number of columns with this number of positions."""
    for convolution in reversed(convolutions):
        positions = max(1, (positions - 1) * convolution.stride + convolution.kernel - 2 * convolution.padding)
    return positions
