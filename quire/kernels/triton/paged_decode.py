"""Attention of single queries over paged keys and values; the twin of `decode_reference`.

A sequence is split into ranges of fixed length, which are attended in parallel and then added in order. So a query's
result has the same bits whatever else is in the call, and how many programs there are changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    head_sizes,
    load_columns,
    normalizer,
    page_config,
    store_columns,
)
from quire.kernels.triton.variants import KernelVariant

_NO_WINDOW = 1 << 30
_PROGRAMS = 1024  # that `decode` aims at: several for each multiprocessor


@triton.jit
def split_bounds(length, window, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """First position that the last query of a sequence attends to, where the first split begins, size, and count.

    They depend on nothing but the sequence's own length, so its splits are the same in any batch. SPLIT positions
    each, or a multiple of that beyond MAX_SPLITS.
    """
    first = tl.maximum(length - window, 0)
    origin = first // BLOCK_N * BLOCK_N
    size = SPLIT * tl.maximum(tl.cdiv(tl.cdiv(length - origin, SPLIT), MAX_SPLITS), 1)
    return first, origin, size, tl.cdiv(length - origin, size)


@triton.jit(do_not_specialize=["slots"])
def decode_kernel(
    q, keys, values, key_scales, value_scales, head_scales, tables, lengths, sinks, slopes, out, parts, stats, q_row,
    q_head, table_row, out_row, out_head, key_head, key_block, key_row, value_head, value_block, value_row, kv_heads,
    slots, scale, softcap, value_scale, window,
    GROUP: tl.constexpr, TILES: tl.constexpr, SINGLE: tl.constexpr, KEY_DIM: tl.constexpr, KEY_MAIN: tl.constexpr,
    KEY_TAIL: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_MAIN: tl.constexpr, VALUE_TAIL: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_TYPE: tl.constexpr, SHARED: tl.constexpr, SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, HEAD_SCALES: tl.constexpr, INTERPRETED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """A program per row, KV head and tile of its query heads, on axis 0; those of axis 1 share the splits.

    parts: (rows, slots, heads, value dim) and stats: (rows, slots, heads, 2) for `reduce_kernel`; not used if SINGLE.
    """
    unit = tl.program_id(0)
    kv_head = (unit // TILES % kv_heads).to(tl.int64)
    row = (unit // TILES // kv_heads).to(tl.int64)
    member = unit % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    stored = member < GROUP
    head = kv_head * GROUP + member
    length = tl.load(lengths + row).to(tl.int32)
    first, origin, size, count = split_bounds(length, window, SPLIT, MAX_SPLITS, BLOCK_N)
    queries = q + row * q_row + head * q_head
    q_main = load_columns(queries, stored, 0, KEY_MAIN, KEY_DIM)
    q_tail = q_main if KEY_TAIL == 0 else load_columns(queries, stored, KEY_MAIN, KEY_TAIL, KEY_DIM)
    last = tl.full([BLOCK_M], 0, tl.int32) + length - 1
    slope = tl.load(slopes + head, mask=stored, other=0.0).to(tl.float32) if ALIBI else last
    sink = tl.load(sinks + head, mask=stored, other=0.0).to(tl.float32) if SINKS else last
    if HEAD_SCALES:
        scale *= tl.load(head_scales + kv_head)
        value_scale *= tl.load(head_scales + kv_heads + kv_head)
    # The compiler removes a loop of one round, and then keeps no addresses of results in registers during it.
    first_split, end, step = (0, 1, 1) if SINGLE else (tl.program_id(1), count, tl.num_programs(1))
    for split in range(first_split, end, step):
        begin = origin + split * size
        acc, acc_tail, top, total = attend_pages(
            q_main, q_tail, last, slope,
            keys + kv_head * key_head, values + kv_head * value_head,
            key_scales + kv_head * (key_head // 4), value_scales + kv_head * (value_head // 4),
            tables + row * table_row, key_block, key_row, value_block, value_row,
            first, begin, tl.minimum(begin + size, length), scale, softcap, window, slopes, 0, last, last,
            KEY_DIM, KEY_MAIN, KEY_TAIL, VALUE_DIM, VALUE_MAIN, VALUE_TAIL, PAGE_SIZE, PAGE_TYPE, BLOCK_N,
            SHARED, False, False, SOFTCAP, ALIBI, False, False, INTERPRETED,
        )  # fmt: skip
        if HEAD_SCALES:  # before the normalizer, as `reduce_kernel` does not know them
            acc, acc_tail = acc * value_scale, acc_tail * value_scale
        if SINGLE:
            rows = out + row * out_row + head * out_head
            factor = (normalizer(top, total, sink, SINKS) * (1.0 if HEAD_SCALES else value_scale))[:, None]
            acc, acc_tail = acc * factor, acc_tail * factor
        else:
            place = ((row * slots + split) * kv_heads + kv_head) * GROUP  # adjacent heads have one address
            rows = parts + place * VALUE_DIM + member * VALUE_DIM
            tl.store(stats + place * 2 + member * 2, top, mask=stored)
            tl.store(stats + place * 2 + member * 2 + 1, total, mask=stored)
        store_columns(rows, acc, stored, 0, VALUE_MAIN, VALUE_DIM)
        if VALUE_TAIL > 0:
            store_columns(rows, acc_tail, stored, VALUE_MAIN, VALUE_TAIL, VALUE_DIM)


@triton.jit(do_not_specialize=["slots"])
def reduce_kernel(
    parts, stats, lengths, sinks, out, out_row, out_head, heads, slots, value_scale, window,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, SINKS: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """A program per row and head: adds the splits in order."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + row).to(tl.int32)
    _, _, _, count = split_bounds(length, window, SPLIT, MAX_SPLITS, BLOCK_N)
    place = row * slots * heads + head  # of the first split; the next one is `heads` further
    index = tl.arange(0, SLOTS)
    tops = tl.load(stats + (place + index * heads) * 2, mask=index < count, other=float("-inf"))
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    columns = tl.arange(0, WIDTH)
    acc = tl.zeros([WIDTH], tl.float32)
    total = 0.0
    for split in range(count):
        weight = tl.exp2(tl.load(stats + (place + split * heads) * 2) - base)
        total += weight * tl.load(stats + (place + split * heads) * 2 + 1)
        acc += weight * tl.load(parts + (place + split * heads) * DIM + columns, mask=columns < DIM, other=0.0)
    sink = tl.load(sinks + head).to(tl.float32) if SINKS else top
    acc *= normalizer(top, total, sink, SINKS) * value_scale
    tl.store(out + row * out_row + head * out_head + columns, acc.to(out.dtype.element_ty), mask=columns < DIM)


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    value_scale: float = 1.0,
    head_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one query per sequence, which is at the sequence's last position.

    Args:
        q: (sequences, heads, dim) float32, float16 or bfloat16, last stride 1.
        keys: pages (kv_heads, blocks, block_size, dim) of q's dtype, int8 or float8_e4m3fn, last stride 1, like
            values, which may be a view of the keys. Rows of int8 begin with their scales.
        block_tables: (sequences, blocks) int32; entries past a sequence's end and before its window are not read.
        seq_lens: (sequences,) int32 or int64. The result of a sequence of 0 positions is 0.
        max_seq_len: no sequence is longer. It decides how many programs there are, and no bit of the result.
        scale: of products; with float8 keys times their scale.
        window: positions that a query attends to, its own included.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: (heads,) logits without a value.
        alibi: (heads,) float32; scores lose alibi * distance.
        value_scale: of results: the scale of float8 values.
        head_scales: (2, kv_heads) float32, contiguous: factors of `scale` and `value_scale` for each KV head.
        out: what to write to, in place of a new tensor.

    Returns:
        (sequences, heads, value_dim) of q's dtype.
    """
    pages, count, heads = as_pages(keys, values), q.shape[0], q.shape[1]
    kv_heads, _, block_size, _ = keys.shape
    out = q.new_empty((count, heads, pages.value_dim)) if out is None else out
    if not count:
        return out
    config = dict(page_config("decode", q, pages))
    group = heads // kv_heads
    block_m = min(config.pop("MAX_HEADS"), max(16, triton.next_power_of_2(group)))
    units = count * kv_heads * triton.cdiv(group, block_m)
    reach = max_seq_len if window is None else min(max_seq_len, window + config["BLOCK_N"])
    slots = max(1, min(triton.cdiv(reach, config["SPLIT"]), config["MAX_SPLITS"]))
    single = slots == 1
    parts, stats = (
        out if single else q.new_empty((count, slots, heads, n), dtype=torch.float32) for n in (pages.value_dim, 2)
    )
    window = _NO_WINDOW if window is None else window
    decode_kernel[(units, min(slots, triton.cdiv(_PROGRAMS, units)))](
        q, pages.keys, pages.values, pages.key_scales, pages.value_scales,
        q if head_scales is None else head_scales, block_tables, seq_lens,
        q if sinks is None else sinks, q if alibi is None else alibi, out, parts, stats,
        q.stride(0), q.stride(1), block_tables.stride(0), out.stride(0), out.stride(1),
        *keys.stride()[:3], *values.stride()[:3], kv_heads, slots, scale, softcap or 0.0, value_scale, window,
        GROUP=group, TILES=triton.cdiv(group, block_m), SINGLE=single, **pages.sizes, PAGE_SIZE=block_size,
        PAGE_TYPE=pages.page_type, SHARED=pages.shared, SINKS=sinks is not None, SOFTCAP=softcap is not None,
        ALIBI=alibi is not None, HEAD_SCALES=head_scales is not None, INTERPRETED=gpu.is_interpreted(), BLOCK_M=block_m,
        **config, enable_fp_fusion=False,
    )  # fmt: skip
    if single:
        return out
    value_scale = value_scale if head_scales is None else 1.0  # which the parts have then
    return _add_splits(parts, stats, seq_lens, sinks, value_scale, window, config, out)


def _add_splits(
    parts: Tensor,
    stats: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    value_scale: float,
    window: int,
    config: Mapping[str, int],
    out: Tensor,
) -> Tensor:
    """Write what `decode_kernel` computed of all splits to `out` (sequences, heads, value_dim)."""
    count, slots, heads, dim = parts.shape
    sizes = {name: config[name] for name in ("BLOCK_N", "SPLIT", "MAX_SPLITS")}
    reduce_kernel[(count, heads)](
        parts, stats, seq_lens, parts if sinks is None else sinks, out, out.stride(0), out.stride(1), heads, slots,
        value_scale, window, DIM=dim, WIDTH=triton.next_power_of_2(dim), SLOTS=triton.next_power_of_2(slots),
        SINKS=sinks is not None, **sizes, enable_fp_fusion=False,
    )  # fmt: skip
    return out


_POINTERS = ("tables", "lengths", "sinks", "slopes", "parts", "stats", "key_scales", "value_scales", "head_scales")
_STRIDES = (
    "q_row", "q_head", "table_row", "out_row", "out_head", "key_head", "key_block", "key_row", "value_head",
    "value_block", "value_row",
)  # fmt: skip


def _signature(dtype: str, pages: str) -> dict[str, str]:
    """Types of the arguments of `decode_kernel` and `reduce_kernel`."""
    types = dict.fromkeys(("q", "out"), f"*{dtype}") | dict.fromkeys(("keys", "values"), f"*{pages}")
    types |= {"tables": "*i32", "lengths": "*i64"} | dict.fromkeys(_POINTERS[2:], "*fp32")
    types |= dict.fromkeys((*_STRIDES, "kv_heads", "slots", "heads", "window"), "i32")
    return types | dict.fromkeys(("scale", "softcap", "value_scale"), "fp32")


def _decode_variant(dtype: str, pages: str, group: int, dim: int, value_dim: int, **features: bool) -> KernelVariant:
    bits = 32 if dtype == "fp32" else 16
    page_type = {"i8": 1, "u8": 2}.get(pages, 0)
    config = dict(
        tuning.config(TABLE, "decode", torch.device("cpu"), width=max(dim, value_dim), bits=bits, page=page_type)
    )
    block_m = min(config.pop("MAX_HEADS"), max(16, triton.next_power_of_2(group)))
    launch = {name: config.pop(name) for name in ("num_warps", "num_stages")}
    constants = {
        "GROUP": group, "TILES": triton.cdiv(group, block_m), "SINGLE": False, **head_sizes(dim, value_dim),
        "PAGE_SIZE": 16, "PAGE_TYPE": page_type, "SHARED": dim > 256, "SINKS": False, "SOFTCAP": False, "ALIBI": False,
        "HEAD_SCALES": False, "INTERPRETED": False, "BLOCK_M": block_m, **config, **features,
    }  # fmt: skip
    signature = {name: kind for name, kind in _signature(dtype, pages).items() if name in decode_kernel.arg_names}
    return KernelVariant(decode_kernel, signature, constants, divisible=_STRIDES, **launch)


VARIANTS = [
    _decode_variant("bf16", "bf16", 4, 128, 128),
    _decode_variant("fp16", "fp16", 1, 80, 80, SINGLE=True, SOFTCAP=True, SINKS=True, ALIBI=True),
    _decode_variant("fp32", "fp32", 8, 64, 64),
    _decode_variant("bf16", "i8", 4, 128, 128),
    _decode_variant("bf16", "u8", 4, 128, 128),
    _decode_variant("bf16", "u8", 4, 128, 128, HEAD_SCALES=True),
    _decode_variant("bf16", "bf16", 16, 576, 512),
    _decode_variant("bf16", "bf16", 128, 576, 512),
    _decode_variant("bf16", "bf16", 128, 576, 512, SINGLE=True),
    _decode_variant("bf16", "i8", 128, 576, 512),
    _decode_variant("bf16", "i8", 128, 576, 512, SINGLE=True),
    _decode_variant("bf16", "u8", 128, 576, 512),
    _decode_variant("bf16", "u8", 128, 576, 512, SINGLE=True),
    _decode_variant("fp32", "fp32", 128, 576, 512),
    KernelVariant(
        reduce_kernel,
        {name: kind for name, kind in _signature("bf16", "bf16").items() if name in reduce_kernel.arg_names},
        {"DIM": 128, "WIDTH": 128, "SLOTS": 64, "SINKS": True, "BLOCK_N": 64, "SPLIT": 256, "MAX_SPLITS": 64},
    ),
]
