"""Rows of a table by their indices: embeddings, cosines and sines. On GPUs torch's gather is a single kernel."""

from __future__ import annotations

from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty

_WORD = 4  # bytes that the kernel copies at a time


def take_rows(table: Tensor, indices: Tensor) -> Tensor:
    """(n, size) of a table (rows, size) for indices (n,) int64, which are not checked."""
    itemsize = table.itemsize
    if table.shape[1] * itemsize % _WORD or table.stride(0) * itemsize % _WORD or not native.supports(table):
        return table[indices]
    out = empty((len(indices), table.shape[1]), table.dtype)
    native.kernels.take_rows(table=table, indices=indices, out=out)
    return out
