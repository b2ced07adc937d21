"""Rows of a table by their indices: embeddings, angles."""

from __future__ import annotations

from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty

_WORD = 4  # bytes


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """(n, size) of a table (.., size) for indices (n,) int64, which have to be within it."""
    words, rest = divmod(table.shape[1] * table.itemsize, _WORD)
    stride, gap = divmod(table.stride(0) * table.itemsize, _WORD)
    if rest or gap or not native.supports(table):
        return table[rows]
    out = empty((len(rows), table.shape[1]), table.dtype)
    native.kernels.take_rows(table.data_ptr(), rows.data_ptr(), out.data_ptr(), len(rows), words, stride, 1)
    return out
