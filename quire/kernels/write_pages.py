"""Writing of new keys and values to pages; see ``paged_attention`` for their formats."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.int8_pages import SCALE, quantize_rows, row_dim

_MAX_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max


def write_pages(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    k: Tensor,
    v: Tensor | None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    head_scales: Tensor | None = None,
) -> None:
    """Write new keys and values to their slots.

    Args:
        keys: pages, like values.
        slots: (tokens,) int64, block * block_size + offset. Tokens with a negative one are not stored, except that the
            compiled kernels take none.
        k: (tokens, kv_heads, dim), like v.
        v: None if the values are a view of the keys.
        key_scale: of pages of float8, like value_scale and head_scales; see `quire.kernels.paged_attention`.
    """
    new = (k,) if v is None else (k, v)
    if supports_rows(keys, values, *new) and all(rows.stride(1) == rows.shape[2] for rows in new):
        native.kernels.write_pages(key_pages=keys, value_pages=values, slots=slots, keys=k, values=v)
    elif triton_supports(keys, values) and gpu.supports(keys, values, slots, *new):
        from quire.kernels.triton import write_pages as kernel

        k, v = with_dense_rows(k), None if v is None else with_dense_rows(v)
        kernel.write_pages(
            keys, values, slots, k, v, key_scale=key_scale, value_scale=value_scale, head_scales=head_scales
        )
    else:
        write_reference(keys, values, slots, k, v, (key_scale, value_scale), head_scales)


def write_reference(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    k: Tensor,
    v: Tensor | None,
    scales: tuple[float, float] = (1.0, 1.0),
    head_scales: Tensor | None = None,
) -> None:
    """`write_pages` in torch."""
    factors = with_head_scales(*scales, head_scales)
    stored = slots >= 0
    block, offset = slots[stored] // keys.shape[2], slots[stored] % keys.shape[2]
    for pages, rows, scale in zip((keys, values), (k,) if v is None else (k, v), factors, strict=False):
        rows = rows[stored]
        if pages.dtype is torch.int8:
            rows = quantize_rows(rows)
        elif pages.dtype is torch.float8_e4m3fn:
            rows = rows.float() / (scale[:, None] if isinstance(scale, Tensor) else scale)
            rows = rows.clamp(-_MAX_FLOAT8, _MAX_FLOAT8).to(pages.dtype).view(torch.uint8)
            pages = pages.view(torch.uint8)  # torch has no indexing of float8
        pages[:, block, offset] = rows.transpose(0, 1)


def with_head_scales(
    key_scale: float, value_scale: float, head_scales: Tensor | None
) -> tuple[float | Tensor, float | Tensor]:
    """The scales of keys and of values: of all, or of each KV head, (kv_heads,)."""
    if head_scales is None:
        return key_scale, value_scale
    return head_scales[0] * key_scale, head_scales[1] * value_scale


def page_dim(pages: Tensor) -> int:
    """Elements of a row of pages, without the scales of int8 rows."""
    return row_dim(pages.shape[-1]) if pages.dtype is torch.int8 else pages.shape[-1]


def supports_rows(keys: Tensor, values: Tensor, *rows: Tensor) -> bool:
    """Whether the compiled kernels can read or write the pages and read rows of queries, keys or values."""
    if keys.dtype is not torch.int8:
        return native.supports(keys, values, *rows)
    fit = all(
        page_dim(pages) % native.LANES == 0 and pages.is_cpu and pages.stride(-1) == 1 for pages in (keys, values)
    )
    return fit and native.supports(*rows) if rows else fit and native.instructions() is not None


def triton_supports(keys: Tensor, values: Tensor) -> bool:
    """Whether the Triton kernels read and write the pages, on a GPU: scales of int8 rows have to be aligned."""
    aligned = (pages.storage_offset() % SCALE == 0 and all(stride % SCALE == 0 for stride in pages.stride()[:3])
               for pages in (keys, values))  # fmt: skip
    return keys.dtype is not torch.int8 or all(aligned)


def with_dense_rows(x: Tensor) -> Tensor:
    """x, or a copy if its last stride is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()
