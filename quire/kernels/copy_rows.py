"""Copies of parts of rows, with zeros behind them or not, and of token ids below a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty, split_heads


def empty_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """An uninitialized tensor of a shape, with the dtype and the device of x."""
    return empty(shape, x.dtype) if native.supports(x) else x.new_empty(shape)


def copy_rows(x: Tensor, out: Tensor) -> None:
    """Copy x (rows, dim) or (rows, heads, dim) to `out`, whose last dimension may be larger: zeros are behind them.

    The last stride of both is 1.
    """
    if not native.supports(x, out):
        out[..., : x.shape[-1]] = x
        out[..., x.shape[-1] :] = 0
        return
    if x.dim() == 2:
        x, out = (split_heads(rows, 1, rows.shape[1]) for rows in (x, out))
    native.kernels.copy_rows(x=x, out=out)


def pad_rows(x: Tensor, dim: int) -> Tensor:
    """x (rows, heads, n) with zeros behind the n elements of each head: (rows, heads, dim)."""
    if not native.supports(x):
        return F.pad(x, (0, dim - x.shape[2]))
    out = empty((len(x), x.shape[1], dim), x.dtype)
    native.kernels.copy_rows(x=x, out=out)
    return out


def dense_heads(x: Tensor) -> Tensor:
    """x (rows, heads, dim), or a contiguous copy of it, as (rows, heads * dim)."""
    if _lie_together(x) or not native.supports(x):
        return x.flatten(1)
    out = empty(x.shape, x.dtype)
    native.kernels.copy_rows(x=x, out=out)
    return out.flatten(1)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """(rows, sum of columns) of tensors (rows, columns) each, whose last stride is 1."""
    if not native.supports(*parts):
        return torch.cat(list(parts), 1)
    out = empty((len(parts[0]), sum(part.shape[1] for part in parts)), parts[0].dtype)
    begin = 0
    for part in parts:
        copy_rows(part, out[:, begin : begin + part.shape[1]])
        begin += part.shape[1]
    return out


def contiguous_rows(x: Tensor) -> Tensor:
    """x (rows, dim), or a contiguous copy of it if its rows are further apart."""
    return x if _lie_together(x) else join_columns([x])


def _lie_together(x: Tensor) -> bool:
    """Whether rows lie side by side. To torch one row always does: other rows of a replay may be further apart."""
    return x.is_contiguous() and x.stride(0) == math.prod(x.shape[1:])


def limit_ids(ids: Tensor, limit: int) -> Tensor:
    """Token ids (n,), of which those at the limit and above become 0."""
    if native.instructions() is None or ids.device.type != "cpu" or not ids.is_contiguous():
        return ids.masked_fill(ids >= limit, 0)
    out = empty(ids.shape, ids.dtype)
    native.kernels.limit_ids(ids=ids, out=out, limit=limit)
    return out
