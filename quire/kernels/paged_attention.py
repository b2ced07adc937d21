"""Attention over a paged KV cache. The torch reference gathers a sequence's pages before it multiplies; the compiled
kernels read them in place.

Keys and values are (kv_heads, blocks, block_size, dim), so that gathering leaves each head's positions in order;
how they lie in memory is free but for the last dimension. Values may be a view of the keys (latent attention). Pages of
int8 hold rows of ``int8_pages``, whose last dimension is longer by their scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import native
from quire.kernels.int8_pages import SCALE, dequantize_rows, quantize_rows
from quire.kernels.capture import empty
from quire.kernels.softcap import softcap

_MAX_SCORES = 1 << 24  # numbers in one chunk of scores, 64 MiB as float32


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What happens to the products of queries and keys.

    Attributes:
        window: a query sees so many positions, its own included; none for all.
        sinks: (heads,) a logit per head that joins the softmax and takes its share away.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def write_pages(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Put new keys and values (tokens, kv_heads, dim) into their slots (tokens,) = block * block_size + offset.

    Args:
        keys: pages, as are values.
        v: none where values are the first numbers of the keys.
    """
    new = (k,) if v is None else (k, v)
    if _takes(keys, values, *new) and all(rows.stride(1) == rows.shape[2] for rows in new):
        _write_compiled(keys, values, slots, k, v)
        return
    block, offset = slots // keys.shape[2], slots % keys.shape[2]
    for pages, rows in zip((keys, values), new, strict=False):
        pages[:, block, offset] = (quantize_rows(rows) if pages.dtype is torch.int8 else rows).transpose(0, 1)


def _write_compiled(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
    native.kernels.write_pages(
        native.CODES[k.dtype], *_pages(keys), *_pages(values), slots.data_ptr(), k.data_ptr(),
        0 if v is None else v.data_ptr(), k.shape[0], k.shape[1], keys.shape[2], k.shape[2],
        0 if v is None else v.shape[2], k.stride(0), 0 if v is None else v.stride(0), int(keys.dtype is torch.int8),
    )  # fmt: skip


def _pages(pages: Tensor) -> tuple[int, int, int, int]:
    """Where they are, and how far apart heads, blocks and rows lie."""
    head, block, row, _ = pages.stride()
    return pages.data_ptr(), head, block, row


def paged_decode(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, math: AttentionParams
) -> Tensor:
    """One query per sequence.

    Args:
        q: (sequences, heads, dim), each at the last position of its sequence.
        keys: pages, as are values.
        tables: (sequences, blocks) int32 block tables; what lies behind a sequence's end is masked.
        lengths: (sequences,) int64 positions including the query's own.

    Returns:
        (sequences, heads, value_dim)
    """
    if supports_pages(keys, values) and _takes(keys, values, q):
        return _decode_in_place(_without_gaps(q), keys, values, tables, lengths, math)
    return decode_reference(q, keys, values, tables, lengths, math)


def _without_gaps(q: Tensor) -> Tensor:
    """With the heads of a token side by side, as some models' are not."""
    return q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()


def supports_pages(keys: Tensor, values: Tensor) -> bool:
    """Whether the compiled kernel can read such pages; lengths may then differ at no cost."""
    dims = _dim(keys), _dim(values)
    return _takes(keys, values) and all(dim % native.PAIR == 0 and dim <= native.MAX_DIM for dim in dims)


def _dim(pages: Tensor) -> int:
    return pages.shape[-1] - (SCALE if pages.dtype is torch.int8 else 0)


def _takes(keys: Tensor, values: Tensor, *rows: Tensor) -> bool:
    """Whether the kernels can work on such pages and on rows that belong to them."""
    if keys.dtype is not torch.int8:
        return native.supports(keys, values, *rows)
    fit = all(_dim(pages) % native.LANES == 0 and pages.is_cpu and pages.stride(-1) == 1 for pages in (keys, values))
    return fit and native.supports(*rows) if rows else fit and native.instructions() is not None


def _decode_in_place(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, math: AttentionParams
) -> Tensor:
    sequences, heads, key_dim = q.shape
    (kv_heads, _, block_size, _), value_dim = values.shape, _dim(values)
    out = empty((sequences, heads, value_dim), q.dtype)
    sinks = None if math.sinks is None else math.sinks.float()
    native.kernels.paged_decode(
        native.CODES[q.dtype], q.data_ptr(), *_pages(keys), *_pages(values), out.data_ptr(), tables.data_ptr(),
        lengths.data_ptr(), 0 if sinks is None else sinks.data_ptr(), sequences, heads, kv_heads, q.stride(0),
        key_dim, value_dim, block_size, tables.stride(0), math.window or 0, math.scale, math.softcap or 0.0,
        int(keys.dtype is torch.int8), tables.numel() * block_size,
    )  # fmt: skip
    return out


def decode_reference(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, math: AttentionParams
) -> Tensor:
    """`paged_decode` in torch."""
    count, heads, _ = q.shape
    kv_heads = keys.shape[0]
    k, v = (_gather(pages, tables.flatten(), q.dtype).unflatten(1, (count, -1)) for pages in (keys, values))
    grouped = q.unflatten(1, (kv_heads, -1)).transpose(0, 1)
    scores = _scores(grouped, k, math)
    position = torch.arange(k.shape[2], device=q.device)
    seen = position < lengths[:, None]
    if math.window is not None:
        seen &= position >= lengths[:, None] - math.window
    scores.masked_fill_(~seen[None, :, None, :], -torch.inf)
    sinks = None if math.sinks is None else math.sinks.view(kv_heads, 1, -1, 1)
    weights = _softmax(scores, sinks).to(v.dtype)
    out = torch.matmul(weights, v)
    if bool(out.isnan().any()):
        # A weight of 0 does not mute what is not finite; pages that sequences left behind may hold that. Muting it
        # always would take longer than the product.
        out = torch.matmul(weights, v.masked_fill_(~seen[None, :, :, None], 0.0))
    return out.transpose(0, 1).reshape(count, heads, -1)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Consecutive tokens of sequences, at each one's last positions, the spans of one token first.

    Attributes:
        tables: (spans, blocks) int32 block tables.
        lengths: (spans,) int64 positions including those of the span.
        counts: (1 + spans,) int64 how many spans there are, then each one's tokens.
    """

    tables: Tensor
    lengths: Tensor
    counts: Tensor


def supports_varlen(keys: Tensor, values: Tensor, dtype: torch.dtype) -> bool:
    """Whether `paged_varlen` can read such pages with queries of that type."""
    return dtype is torch.bfloat16 and native.instructions() is not None and supports_pages(keys, values)


def paged_varlen(q: Tensor, keys: Tensor, values: Tensor, spans: AttentionMetadata, math: AttentionParams) -> Tensor:
    """All of a step's queries in one call: `paged_decode` of single tokens, `paged_prefill` of longer spans.

    Args:
        q: (tokens, heads, dim) bfloat16.
        keys: pages, as are values.

    Returns:
        (tokens, heads, value_dim)
    """
    q = _without_gaps(q)
    tokens, heads, key_dim = q.shape
    (kv_heads, _, block_size, _), value_dim = values.shape, _dim(values)
    out = empty((tokens, heads, value_dim), q.dtype)
    sinks = None if math.sinks is None else math.sinks.float()
    native.kernels.paged_varlen(
        q.data_ptr(), *_pages(keys), *_pages(values), out.data_ptr(), spans.tables.data_ptr(), spans.lengths.data_ptr(),
        spans.counts.data_ptr(), 0 if sinks is None else sinks.data_ptr(), tokens, heads, kv_heads, q.stride(0),
        key_dim, value_dim, block_size, spans.tables.stride(0), math.window or 0, math.scale, math.softcap or 0.0,
        int(keys.dtype is torch.int8),
    )  # fmt: skip
    return out


def paged_prefill(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: int, math: AttentionParams) -> Tensor:
    """The queries of one sequence at its last positions, causally.

    Args:
        q: (tokens, heads, dim).
        keys: pages, as are values.
        table: (blocks,) int32 the sequence's blocks.
        length: positions including those of all queries.

    Returns:
        (tokens, heads, value_dim)
    """
    if q.dtype is torch.bfloat16 and supports_pages(keys, values) and _takes(keys, values, q):
        span = AttentionMetadata(table[None], torch.tensor([length]), torch.tensor([1, len(q)]))
        return paged_varlen(q, keys, values, span, math)
    return prefill_reference(q, keys, values, table, length, math)


def prefill_reference(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: int, math: AttentionParams
) -> Tensor:
    """`paged_prefill` in torch."""
    k, v = (_gather(pages, table, q.dtype)[:, :length] for pages in (keys, values))
    if math.softcap is None and math.sinks is None and k.shape[-1] == v.shape[-1]:
        return _fused_prefill(q, k, v, math)
    rows = max(1, _MAX_SCORES // (q.shape[1] * length))
    first = length - q.shape[0]
    chunks = q.split(rows)
    return torch.cat([_plain_prefill(chunk, k, v, first + i * rows, math) for i, chunk in enumerate(chunks)])


def _gather(pages: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """(kv_heads, positions, dim) of the given blocks."""
    rows = pages.index_select(1, blocks).flatten(1, 2)
    return dequantize_rows(rows, dtype) if pages.dtype is torch.int8 else rows


def _fused_prefill(q: Tensor, k: Tensor, v: Tensor, math: AttentionParams) -> Tensor:
    tokens, length = q.shape[0], k.shape[1]
    whole = tokens == length and (math.window is None or math.window >= length)
    mask = None if whole else _mask(tokens, length - tokens, length, math.window, q.device)
    group = q.shape[1] // k.shape[0]
    k, v = (x.repeat_interleave(group, 0) if group > 1 else x for x in (k, v))
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=whole, scale=math.scale
    )
    return out[0].transpose(0, 1)


def _plain_prefill(q: Tensor, k: Tensor, v: Tensor, first: int, math: AttentionParams) -> Tensor:
    """Queries at positions from `first` on; scores are spelled out, so any math goes."""
    tokens, heads, _ = q.shape
    kv_heads = k.shape[0]
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # kv_heads, group * tokens, dim
    scores = _scores(grouped, k, math).unflatten(1, (-1, tokens))
    scores.masked_fill_(~_mask(tokens, first, k.shape[1], math.window, q.device), -torch.inf)
    sinks = None if math.sinks is None else math.sinks.view(kv_heads, -1, 1, 1)
    weights = _softmax(scores, sinks).to(v.dtype).flatten(1, 2)
    out: Tensor = torch.matmul(weights, v).unflatten(1, (-1, tokens))
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, -1)


def _mask(tokens: int, first: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """(tokens, length): which positions the queries from `first` on see."""
    query = torch.arange(first, first + tokens, device=device)[:, None]
    position = torch.arange(length, device=device)
    seen = position <= query
    return seen if window is None else seen & (position > query - window)


def _scores(q: Tensor, k: Tensor, math: AttentionParams) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * math.scale
    return scores if math.softcap is None else softcap(scores, math.softcap)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    joined = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1)
    return joined.softmax(-1)[..., :-1]
