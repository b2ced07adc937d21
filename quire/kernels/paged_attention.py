"""Attention over a paged KV cache. The torch references gather the pages of a sequence first; the compiled kernels and
those of ``quire.kernels.triton`` read them in place.

Pages of keys and of values are (kv_heads, blocks, block_size, dim), so that gathering leaves the positions of each head
in order. Their last stride has to be 1. Values may be a view of the keys (latent attention). Pages of int8 have rows as
in ``int8_pages``, whose last dimension is longer by their scales. Pages of float8_e4m3fn share one scale, or
those of a KV head do, which the params hold; the compiled kernels do not support them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty
from quire.kernels.int8_pages import dequantize_rows
from quire.kernels.softcap import softcap
from quire.kernels.write_pages import page_dim, supports_rows, triton_supports, with_dense_rows, with_head_scales

_MAX_SCORES = 1 << 24  # elements of scores that the reference computes at a time, 64 MiB


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Parameters applied to the products of queries and keys.

    Attributes:
        window: number of positions a query attends to, its own included; None for all.
        softcap: scores become softcap * tanh(score / softcap); None for no cap.
        sinks: (heads,) one more logit per head in the softmax, without a value.
        alibi: (heads,) float32; scores lose alibi * distance.
        bias: bias of scores in encoders, see `EncoderAttentionParams.biases`.
        key_scale: of pages of float8: keys are their elements times this, like value_scale. Other pages have no such
            scale.
        head_scales: (2, kv_heads) float32, contiguous: the same for keys and values of each KV head; None: they are all
            1.
        is_causal: queries attend to earlier positions only, also in steps in which some see others.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    bias: Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
    head_scales: Tensor | None = None
    is_causal: bool = False


def paged_decode(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, seq_lens: Tensor, params: AttentionParams
) -> Tensor:
    """Attention of one query per sequence.

    Args:
        q: (sequences, heads, dim), each at the last position of its sequence.
        keys: pages, like values.
        block_tables: (sequences, blocks) int32; entries past the end of a sequence are ignored.
        seq_lens: (sequences,) int64, positions including that of the query.

    Returns:
        (sequences, heads, value_dim)
    """
    is_plain = params.softcap is None and params.sinks is None
    if not (supports_pages(keys, values) and supports_rows(keys, values, q) and (params.alibi is None or is_plain)):
        most = block_tables.shape[1] * keys.shape[2]
        return attend_singles(q, keys, values, block_tables, seq_lens, most, params)
    q = _with_dense_heads(q)
    out = empty((*q.shape[:2], page_dim(values)), q.dtype)
    arguments: dict[str, Any] = {
        "q": q,
        "keys": keys,
        "values": values,
        "out": out,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "window": params.window or 0,
        "scale": params.scale,
    }
    if params.alibi is not None:
        native.kernels.alibi_decode(**arguments, slopes=params.alibi)
    else:
        sinks = None if params.sinks is None else params.sinks.float()
        native.kernels.paged_decode(**arguments, sinks=sinks, softcap=params.softcap or 0.0)
    return out


def _with_dense_heads(q: Tensor) -> Tensor:
    """q, or a copy if the heads of a token are not contiguous."""
    return q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()


def supports_pages(keys: Tensor, values: Tensor) -> bool:
    """Whether compiled attention can read the pages in place, so that sequences of any lengths can share a call."""
    dims = page_dim(keys), page_dim(values)
    return supports_rows(keys, values) and all(
        dim % native.ATTENTION_VECTOR_WIDTH == 0 and dim <= native.MAX_DIM for dim in dims
    )


def decode_reference(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, seq_lens: Tensor, params: AttentionParams
) -> Tensor:
    """`paged_decode` in torch."""
    count, heads, _ = q.shape
    if not count:
        return q.new_empty((0, heads, page_dim(values)))
    kv_heads = keys.shape[0]
    k, v = (rows.unflatten(1, (count, -1)) for rows in _gather(keys, values, block_tables.flatten(), q.dtype, params))
    grouped = q.unflatten(1, (kv_heads, -1)).transpose(0, 1)
    scores = _scores(grouped, k, params)
    position = torch.arange(k.shape[2], device=q.device)
    if params.alibi is not None:
        scores += params.alibi.view(kv_heads, 1, -1, 1) * (position - (seq_lens - 1)[:, None])[None, :, None]
    seen = position < seq_lens[:, None]
    if params.window is not None:
        seen &= position >= seq_lens[:, None] - params.window
    scores.masked_fill_(~seen[None, :, None, :], -torch.inf)
    sinks = None if params.sinks is None else params.sinks.view(kv_heads, 1, -1, 1)
    weights = _softmax(scores, sinks).to(v.dtype)
    out = torch.matmul(weights, v)
    if bool(out.isnan().any()):
        # 0 * NaN and 0 * inf are NaN, and pages that former sequences used may hold either. Zeroing masked values in
        # every call would take longer than the product.
        out = torch.matmul(weights, v.masked_fill_(~seen[None, :, :, None], 0.0))
    return out.transpose(0, 1).reshape(count, heads, -1)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Spans of tokens: consecutive tokens at the last positions of a sequence.

    Those that attend as single tokens come first.

    Attributes:
        block_tables: (spans, blocks) int32.
        seq_lens: (spans,) int64, positions of the sequence including those of the span.
        counts: (2 + spans,) int64, the number of spans that attend as single tokens, the number of all spans, and then
            the number of tokens of each span.
    """

    block_tables: Tensor
    seq_lens: Tensor
    counts: Tensor


def supports_varlen(keys: Tensor, values: Tensor, dtype: torch.dtype) -> bool:
    """Whether `paged_varlen` can be called with these pages and queries of `dtype`."""
    return dtype is torch.bfloat16 and native.instructions() is not None and supports_pages(keys, values)


def paged_varlen(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: AttentionMetadata,
    params: AttentionParams,
    visible: Tensor | None = None,
) -> Tensor:
    """Attention of all queries of a step: as `paged_decode` for single tokens, as `paged_prefill` for other spans.

    The kernels of `supports_varlen` compute it, except with ALiBi, which few models have: there torch does.

    Args:
        q: (tokens, heads, dim) bfloat16.
        keys: pages, like values.
        visible: (tokens, 2) int32, see `paged_prefill`. Those of single tokens are ignored.

    Returns:
        (tokens, heads, value_dim)
    """
    if params.alibi is not None:
        return _varlen_reference(q, keys, values, spans, params, visible)
    q = _with_dense_heads(q)
    out = empty((*q.shape[:2], page_dim(values)), q.dtype)
    native.kernels.paged_varlen(
        q=q,
        keys=keys,
        values=values,
        out=out,
        block_tables=spans.block_tables,
        seq_lens=spans.seq_lens,
        counts=spans.counts,
        sinks=None if params.sinks is None else params.sinks.float(),
        visible=visible,
        window=params.window or 0,
        scale=params.scale,
        softcap=params.softcap or 0.0,
    )
    return out


def _varlen_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: AttentionMetadata,
    params: AttentionParams,
    visible: Tensor | None = None,
) -> Tensor:
    """`paged_varlen` in torch, but for single tokens, which have the bits that `paged_decode` gives."""
    singles, count, *tokens = spans.counts.tolist()
    out, begin = [], singles
    if singles:
        tables, lengths = spans.block_tables[:singles], spans.seq_lens[:singles]
        out.append(paged_decode(q[:singles], keys, values, tables, lengths, params))
    for index in range(singles, count):
        length, end = int(spans.seq_lens[index]), begin + tokens[index]
        table = spans.block_tables[index, : -(-length // keys.shape[2])]
        part = None if visible is None else visible[begin:end]
        out.append(prefill_reference(q[begin:end], keys, values, table, length, params, part))
        begin = end
    return torch.cat(out)


def paged_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    seq_len: int,
    params: AttentionParams,
    visible: Tensor | None = None,
) -> Tensor:
    """Causal attention of the queries at the last positions of one sequence.

    Args:
        q: (tokens, heads, dim).
        keys: pages, like values.
        block_table: (blocks,) int32.
        seq_len: positions including those of the queries.
        visible: (tokens, 2) int32, positions [begin, end) of the sequence that each query attends to as well, among
            them its own: later ones, and earlier ones before its window. None: there are none.

    Returns:
        (tokens, heads, value_dim)
    """
    plain = params.alibi is None
    if plain and q.dtype is torch.bfloat16 and supports_pages(keys, values) and supports_rows(keys, values, q):
        span = AttentionMetadata(block_table[None], torch.tensor([seq_len]), torch.tensor([0, 1, len(q)]))
        return paged_varlen(q, keys, values, span, params, visible)
    if gpu.supports(q, keys, values, block_table):
        length = torch.full((1,), seq_len, dtype=torch.int32, device=q.device)
        starts = torch.arange(2, dtype=torch.int32, device=q.device) * len(q)
        return attend_spans(q, keys, values, block_table[None], length, starts, params, visible)
    return prefill_reference(q, keys, values, block_table, seq_len, params, visible)


def prefill_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    seq_len: int,
    params: AttentionParams,
    visible: Tensor | None = None,
) -> Tensor:
    """`paged_prefill` in torch."""
    k, v = (rows[:, :seq_len] for rows in _gather(keys, values, block_table, q.dtype, params))
    plain = params.softcap is None and params.sinks is None and params.alibi is None
    if plain and k.shape[-1] == v.shape[-1]:
        return _fused_prefill(q, k, v, params, visible)
    rows = max(1, _MAX_SCORES // (q.shape[1] * seq_len))
    first = seq_len - q.shape[0]
    bounds = itertools.repeat(None) if visible is None else iter(visible.split(rows))
    chunks = enumerate(zip(q.split(rows), bounds, strict=False))
    return torch.cat([_explicit_prefill(chunk, k, v, first + i * rows, params, part) for i, (chunk, part) in chunks])


def attend_singles(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    params: AttentionParams,
) -> Tensor:
    """Attention of one query per sequence, by the Triton kernel where it runs.

    Args:
        q: (sequences, heads, dim), each at the last position of its sequence.
        keys: pages, like values.
        block_tables: (sequences, blocks) int32.
        seq_lens: (sequences,) int32 or int64, positions including that of the query; 0: the row is padding, and its
            result is undefined.
        max_seq_len: an upper bound of `seq_lens`.

    Returns:
        (sequences, heads, value_dim)
    """
    if not (triton_supports(keys, values) and gpu.supports(q, keys, values, block_tables, seq_lens)):
        return decode_reference(q, keys, values, block_tables, seq_lens, params)
    from quire.kernels.triton import paged_decode as kernel

    q, options = with_dense_rows(q), _options(params, keys.dtype)
    return kernel.decode(q, keys, values, block_tables, seq_lens, max_seq_len=max_seq_len, **options)


def attend_spans(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    params: AttentionParams,
    visible: Tensor | None = None,
) -> Tensor:
    """Causal attention of spans of queries, the last positions of their sequences, by the Triton kernel where it runs.

    Args:
        q: (tokens, heads, dim), the spans one behind the other.
        keys: pages, like values.
        block_tables: (spans, blocks) int32.
        seq_lens: (spans,) int32 or int64, positions including those of the queries.
        query_starts: (spans + 1,) int32, the first query of each span, and their number. Spans may be empty.
        visible: (tokens, 2) int32, see `paged_prefill`.

    Returns:
        (tokens, heads, value_dim)
    """
    if triton_supports(keys, values) and gpu.supports(q, keys, values, block_tables, seq_lens, query_starts):
        from quire.kernels.triton import paged_prefill as kernel

        q, options = with_dense_rows(q), _options(params, keys.dtype)
        return kernel.prefill(q, keys, values, block_tables, seq_lens, query_starts, visible=visible, **options)
    out = []
    for index, (begin, end) in enumerate(itertools.pairwise(query_starts.tolist())):
        length = int(seq_lens[index])
        table = block_tables[index, : -(-length // keys.shape[2])]
        part = None if visible is None else visible[begin:end]
        out.append(prefill_reference(q[begin:end], keys, values, table, length, params, part))
    return torch.cat(out)


def _options(params: AttentionParams, pages: torch.dtype) -> Mapping[str, Any]:
    """The arguments of the Triton kernels for pages of a dtype."""
    scaled = pages is torch.float8_e4m3fn
    return {
        "scale": params.scale * (params.key_scale if scaled else 1.0),
        "window": params.window,
        "softcap": params.softcap,
        "sinks": params.sinks,
        "alibi": params.alibi,
        "value_scale": params.value_scale if scaled else 1.0,
        "head_scales": params.head_scales if scaled else None,
    }


def _gather(
    keys: Tensor, values: Tensor, blocks: Tensor, dtype: torch.dtype, params: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Keys and values of the given blocks: (kv_heads, positions, dim) each."""
    key_scale, value_scale = with_head_scales(params.key_scale, params.value_scale, params.head_scales)
    return page_rows(keys, blocks, dtype, key_scale), page_rows(values, blocks, dtype, value_scale)


def page_rows(pages: Tensor, blocks: Tensor, dtype: torch.dtype, scale: float | Tensor = 1.0) -> Tensor:
    """The keys or values in `blocks` (blocks,) of pages of any dtype: (kv_heads, positions, dim).

    `dtype`: of the rows of int8 and float8 pages; others keep theirs. `scale`: of float8 pages, or (kv_heads,).
    """
    if pages.dtype is torch.float8_e4m3fn:  # which torch has no indexing of
        rows = pages.view(torch.uint8).index_select(1, blocks).view(pages.dtype).flatten(1, 2)
        return (rows.float() * (scale[:, None, None] if isinstance(scale, Tensor) else scale)).to(dtype)
    rows = pages.index_select(1, blocks).flatten(1, 2)
    return dequantize_rows(rows, dtype) if pages.dtype is torch.int8 else rows


def _fused_prefill(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, visible: Tensor | None) -> Tensor:
    tokens, seq_len = q.shape[0], k.shape[1]
    is_causal = visible is None and tokens == seq_len and (params.window is None or params.window >= seq_len)
    mask = None if is_causal else _mask(tokens, seq_len - tokens, seq_len, params.window, visible, q.device)
    group = q.shape[1] // k.shape[0]
    k, v = (x.repeat_interleave(group, 0) if group > 1 else x for x in (k, v))
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=is_causal, scale=params.scale
    )
    return out[0].transpose(0, 1)


def _explicit_prefill(
    q: Tensor, k: Tensor, v: Tensor, first: int, params: AttentionParams, visible: Tensor | None
) -> Tensor:
    """Attention of queries at positions from `first` on, with explicit scores, so that all params can be applied."""
    tokens, heads, _ = q.shape
    kv_heads = k.shape[0]
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # kv_heads, group * tokens, dim
    scores = _scores(grouped, k, params).unflatten(1, (-1, tokens))
    if params.alibi is not None:
        queries = torch.arange(first, first + tokens, device=q.device)
        distance = torch.arange(k.shape[1], device=q.device) - queries[:, None]
        scores += params.alibi.view(kv_heads, -1, 1, 1) * distance
    scores.masked_fill_(~_mask(tokens, first, k.shape[1], params.window, visible, q.device), -torch.inf)
    sinks = None if params.sinks is None else params.sinks.view(kv_heads, -1, 1, 1)
    weights = _softmax(scores, sinks).to(v.dtype).flatten(1, 2)
    out: Tensor = torch.matmul(weights, v).unflatten(1, (-1, tokens))
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, -1)


def _mask(
    tokens: int, first: int, seq_len: int, window: int | None, visible: Tensor | None, device: torch.device
) -> Tensor:
    """(tokens, seq_len): which positions the queries at positions from `first` on attend to."""
    query = torch.arange(first, first + tokens, device=device)[:, None]
    position = torch.arange(seq_len, device=device)
    earliest = torch.zeros_like(query) if window is None else query - window + 1
    if visible is None:
        return (position >= earliest) & (position <= query)
    begin, end = visible[:, :1], visible[:, 1:]
    return (position >= torch.minimum(earliest, begin)) & (position < torch.maximum(query + 1, end))


def _scores(q: Tensor, k: Tensor, params: AttentionParams) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * params.scale
    return scores if params.softcap is None else softcap(scores, params.softcap)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    joined = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1)
    return joined.softmax(-1)[..., :-1]
