"""Attention of spans of queries over paged keys and values, all in one call; the twin of `prefill_reference`.

A tile has the query heads of one KV head of consecutive queries. Keys are visited in blocks at fixed positions, from
the first that any query of the tile attends to; blocks that a query does not attend to change no bit of its sums. So a
prompt has the same result in any chunks and beside any others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import gpu
from quire.kernels.triton import tuning
from quire.kernels.triton.attention_tiles import (
    TABLE,
    as_pages,
    attend_pages,
    find_sequence,
    head_sizes,
    load_columns,
    normalizer,
    page_config,
    store_columns,
)
from quire.kernels.triton.variants import KernelVariant


@triton.jit(do_not_specialize=["spans"])
def prefill_kernel(
    q, keys, values, key_scales, value_scales, head_scales, tables, lengths, starts, sinks, slopes, biases, visible,
    out, q_row, q_head, table_row, out_row, out_head, key_head, key_block, key_row, value_head, value_block, value_row,
    spans, scale, softcap, value_scale, window, reach,
    GROUP: tl.constexpr, TILES: tl.constexpr, KEY_DIM: tl.constexpr, KEY_MAIN: tl.constexpr, KEY_TAIL: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_MAIN: tl.constexpr, VALUE_TAIL: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_TYPE: tl.constexpr, SHARED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, VISIBLE: tl.constexpr, HEAD_SCALES: tl.constexpr,
    INTERPRETED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program per tile of queries, on axis 0, and per KV head and tile of its query heads, on axis 1.

    Without pages (a PAGE_SIZE of 0), each span attends to its own rows of keys and values.
    """
    heads: tl.constexpr = GROUP if TILES == 1 else BLOCK_M  # of a tile
    queries: tl.constexpr = BLOCK_M // heads
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last ones have the most keys
    span, begin_query = find_sequence(starts, spans, tile, queries)
    begin = tl.load(starts + span).to(tl.int32)
    count = tl.load(starts + span + 1).to(tl.int32) - begin
    if begin_query < count:
        kv_head = (tl.program_id(1) // TILES).to(tl.int64)
        member = tl.program_id(1) % TILES * BLOCK_M + tl.arange(0, BLOCK_M) % heads
        query = begin_query + tl.arange(0, BLOCK_M) // heads
        stored = (query < tl.minimum(count, begin_query + queries)) & (member < GROUP)
        head, token = kv_head * GROUP + member, (begin + query).to(tl.int64)
        length = count if PAGE_SIZE == 0 else tl.load(lengths + span).to(tl.int32)
        last = length - count + query
        past = length - count + begin_query + queries  # the tile's queries
        end = tl.minimum(past if CAUSAL else past + window - 1, length) if CAUSAL or WINDOW else length
        first = tl.maximum(length - count + begin_query + 1 - window, 0) if WINDOW else 0
        earliest, later = last, last
        if VISIBLE:  # queries see more, so that tiles may have more keys
            bounds = visible + 2 * token
            earliest = tl.maximum(last + 1 - window, 0) if WINDOW else last * 0
            earliest = tl.minimum(earliest, tl.load(bounds, mask=stored, other=length).to(tl.int32))
            later = tl.maximum(last + 1, tl.load(bounds + 1, mask=stored, other=0).to(tl.int32))
            first = tl.maximum(tl.minimum(first, tl.min(earliest, 0)), 0)
            end = tl.minimum(tl.maximum(end, tl.max(tl.where(stored, later, 0), 0)), length)
        rows = q + token * q_row + head * q_head
        q_main = load_columns(rows, stored, 0, KEY_MAIN, KEY_DIM)
        q_tail = q_main if KEY_TAIL == 0 else load_columns(rows, stored, KEY_MAIN, KEY_TAIL, KEY_DIM)
        bias_rows = biases + tl.where(stored, head, 0) * (2 * reach + 1) if BIAS else last
        origin = begin.to(tl.int64) if PAGE_SIZE == 0 else 0
        slope = tl.load(slopes + head, mask=stored, other=0.0).to(tl.float32) if ALIBI else last
        if HEAD_SCALES:
            kv_heads = tl.num_programs(1) // TILES
            scale *= tl.load(head_scales + kv_head)
            value_scale *= tl.load(head_scales + kv_heads + kv_head)
        acc, acc_tail, top, total = attend_pages(
            q_main, q_tail, last, slope,
            keys + kv_head * key_head + origin * key_row, values + kv_head * value_head + origin * value_row,
            key_scales + kv_head * (key_head // 4), value_scales + kv_head * (value_head // 4),
            tables + span.to(tl.int64) * table_row, key_block, key_row, value_block, value_row,
            first, first // BLOCK_N * BLOCK_N, end, scale, softcap, window, bias_rows, reach, earliest, later,
            KEY_DIM, KEY_MAIN, KEY_TAIL, VALUE_DIM, VALUE_MAIN, VALUE_TAIL, PAGE_SIZE, PAGE_TYPE, BLOCK_N,
            SHARED, CAUSAL, WINDOW, SOFTCAP, ALIBI, BIAS, VISIBLE, INTERPRETED,
        )  # fmt: skip
        sink = tl.load(sinks + head, mask=stored, other=0.0).to(tl.float32) if SINKS else top
        factor = (normalizer(top, total, sink, SINKS) * value_scale)[:, None]
        rows = out + token * out_row + head * out_head
        store_columns(rows, acc * factor, stored, 0, VALUE_MAIN, VALUE_DIM)
        if VALUE_TAIL > 0:
            store_columns(rows, acc_tail * factor, stored, VALUE_MAIN, VALUE_TAIL, VALUE_DIM)


def prefill_grid(tokens: int, spans: int, heads: int, kv_heads: int, block_m: int) -> tuple[int, int]:
    """Programs of `prefill_kernel`."""
    group = heads // kv_heads
    queries = max(1, block_m // group)
    return tokens // queries + spans, kv_heads * triton.cdiv(group, block_m)


def prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    value_scale: float = 1.0,
    head_scales: Tensor | None = None,
    causal: bool = True,
    visible: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of the queries of spans, which are the last positions of their sequences.

    How many programs there are depends on the numbers of tokens and spans only; some of them have nothing to do.

    Args:
        q: (tokens, heads, dim) float32, float16 or bfloat16, last stride 1.
        keys: pages (kv_heads, blocks, block_size, dim) of q's dtype, int8 or float8_e4m3fn, last stride 1, like
            values, which may be a view of the keys. Rows of int8 begin with their scales.
        block_tables: (spans, blocks) int32; entries past a sequence's end and before its window are not read.
        seq_lens: (spans,) int32 or int64, positions of each sequence including those of the span.
        query_starts: (spans + 1,) int32 or int64, where each span's queries begin among the tokens, and where the last
            one's end. Spans may be empty. Tokens before and after the spans are not written.
        scale: of products; with float8 keys times their scale.
        window: positions that a query attends to, its own included; only if causal.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: (heads,) logits without a value.
        alibi: (heads,) float32; scores lose alibi * distance.
        value_scale: of results: the scale of float8 values.
        head_scales: (2, kv_heads) float32, contiguous: factors of `scale` and `value_scale` for each KV head.
        causal: whether queries only attend to positions up to their own. seq_lens of cross-attention do not include
            the queries.
        visible: (tokens, 2) int32, positions [begin, end) of its sequence that each query attends to as well, among
            them its own: later ones, and earlier ones before its window. Only if causal.
        out: what to write to, in place of a new tensor.

    Returns:
        (tokens, heads, value_dim) of q's dtype.
    """
    pages, (tokens, heads, _), spans = as_pages(keys, values), q.shape, len(seq_lens)
    kv_heads, _, block_size, _ = keys.shape
    out = q.new_empty((tokens, heads, pages.value_dim)) if out is None else out
    if not tokens or not spans:
        return out
    config = page_config("prefill", q, pages)
    group = heads // kv_heads
    tiles = triton.cdiv(group, config["BLOCK_M"])
    prefill_kernel[prefill_grid(tokens, spans, heads, kv_heads, config["BLOCK_M"])](
        q, pages.keys, pages.values, pages.key_scales, pages.value_scales, q if head_scales is None else head_scales,
        block_tables, seq_lens, query_starts,
        q if sinks is None else sinks, q if alibi is None else alibi, q, query_starts if visible is None else visible,
        out,
        q.stride(0), q.stride(1), block_tables.stride(0), out.stride(0), out.stride(1),
        *keys.stride()[:3], *values.stride()[:3], spans, scale, softcap or 0.0, value_scale, window or 0, 0,
        GROUP=group, TILES=tiles, **pages.sizes, PAGE_SIZE=block_size, PAGE_TYPE=pages.page_type, SHARED=pages.shared,
        CAUSAL=causal, WINDOW=window is not None, SINKS=sinks is not None, SOFTCAP=softcap is not None,
        ALIBI=alibi is not None, BIAS=False, VISIBLE=visible is not None, HEAD_SCALES=head_scales is not None,
        INTERPRETED=gpu.is_interpreted(), **config,
    )  # fmt: skip
    return out


_STRIDES = (
    "q_row", "q_head", "table_row", "out_row", "out_head", "key_head", "key_block", "key_row", "value_head",
    "value_block", "value_row",
)  # fmt: skip


def prefill_variant(
    kernel: str, dtype: str, pages: str, group: int, dim: int, value_dim: int, **features: int
) -> KernelVariant:
    """The kernel as `kernel` of the table configures it; `features`: constants that differ from plain attention."""
    page_type, bits = {"i8": 1, "u8": 2}.get(pages, 0), 32 if dtype == "fp32" else 16
    device = torch.device("cpu")
    config = dict(tuning.config(TABLE, kernel, device, width=max(dim, value_dim), bits=bits, page=page_type))
    signature = dict.fromkeys(("q", "out"), f"*{dtype}") | dict.fromkeys(("keys", "values"), f"*{pages}")
    signature |= {"tables": "*i32", "lengths": "*i64", "starts": "*i32", "visible": "*i32"}
    signature |= dict.fromkeys(("key_scales", "value_scales", "head_scales", "sinks", "slopes", "biases"), "*fp32")
    signature |= dict.fromkeys((*_STRIDES, "spans", "window", "reach"), "i32")
    signature |= dict.fromkeys(("scale", "softcap", "value_scale"), "fp32")
    constants = {
        "GROUP": group, "TILES": triton.cdiv(group, config["BLOCK_M"]), **head_sizes(dim, value_dim), "PAGE_SIZE": 16,
        "PAGE_TYPE": page_type, "SHARED": dim > 256, "CAUSAL": True, "WINDOW": False, "SINKS": False,
        "SOFTCAP": False, "ALIBI": False, "BIAS": False, "VISIBLE": False, "HEAD_SCALES": False,
        "INTERPRETED": False,
    }  # fmt: skip
    launch = {name: config.pop(name) for name in ("num_warps", "num_stages")}
    return KernelVariant(prefill_kernel, signature, {**constants, **config, **features}, divisible=_STRIDES, **launch)


VARIANTS = [
    prefill_variant("prefill", "bf16", "bf16", 4, 128, 128),
    prefill_variant("prefill", "fp16", "fp16", 3, 80, 80, WINDOW=True, SOFTCAP=True, SINKS=True, ALIBI=True),
    prefill_variant("prefill", "fp32", "fp32", 4, 128, 128),
    prefill_variant("prefill", "bf16", "bf16", 2, 256, 256, WINDOW=True, VISIBLE=True),
    prefill_variant("prefill", "fp16", "fp16", 2, 256, 256, SOFTCAP=True, VISIBLE=True),
    prefill_variant("prefill", "bf16", "bf16", 1, 256, 256, CAUSAL=False),
    prefill_variant("prefill", "bf16", "i8", 4, 128, 128),
    prefill_variant("prefill", "bf16", "u8", 4, 128, 128),
    prefill_variant("prefill", "bf16", "u8", 4, 128, 128, HEAD_SCALES=True),
    prefill_variant("prefill", "bf16", "bf16", 128, 576, 512),
    prefill_variant("prefill", "fp32", "fp32", 16, 576, 512),
]
