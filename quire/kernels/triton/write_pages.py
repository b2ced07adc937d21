"""Writes new keys and values to their slots in pages; the twin of `quire.kernels.write_pages.write_reference`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.attention_tiles import (
    FP8,
    INT8,
    SCALE_GROUP,
    Pages,
    as_pages,
    load_columns,
    store_columns,
)
from quire.kernels.triton.variants import KernelVariant

_MAX_FP8 = tl.constexpr(448.0)  # largest float8_e4m3fn
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: float32 that has no bits for fractions
_ELEMENTS = 1024  # of a program, at least one head


@triton.jit
def round_to_fp8(x):
    """The nearest float8_e4m3fn of float32 elements, halves to even, at most the largest one; NaN stays.

    Hardware would do it in the conversion, but Triton's interpreter truncates there.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    size = tl.where(size > _MAX_FP8, _MAX_FP8, size)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) & 0xFF, 127 - 6)  # of subnormals: the least
    large = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)  # its last bit is that of the result
    rounded = ((size + large) - large).to(tl.int32, bitcast=True) | (bits & -0x80000000)
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def write_rows(
    pages, scales, elements, slot, head, stored, head_stride, block_stride, row_stride, fp8_scale, head_scales,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_TYPE: tl.constexpr,
    HEAD_SCALES: tl.constexpr,
):  # fmt: skip
    """Write the rows of some heads of one token.

    Args:
        scales: pointer to the first group's scale in pages of int8, which those of others precede.
        elements: (heads, WIDTH), zeros from DIM on.
        slot: int64, not negative.
        head: (heads,) int64; those that are not `stored` are skipped.
        head_scales: pointer to the scales of heads, if they have some of their own (HEAD_SCALES).
    """
    block, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    to = pages + head * head_stride + block * block_stride + offset * row_stride
    if PAGE_TYPE == INT8:
        groups: tl.constexpr = (WIDTH + SCALE_GROUP - 1) // SCALE_GROUP
        exact = tl.reshape(elements.to(tl.float32), (elements.shape[0], groups, WIDTH // groups))
        largest = tl.max(tl.abs(exact), 2)
        odd = tl.sum((exact != exact).to(tl.int32), 2) > 0
        scale = tl.math.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
        scale = tl.where(odd, float("nan"), scale)
        first = scales + head * (head_stride // 4) + block * (block_stride // 4) + offset * (row_stride // 4)
        group = tl.arange(0, groups)
        mask = stored[:, None] & (group * SCALE_GROUP < DIM)[None, :]
        tl.store(first[:, None] - group[None, :], scale, mask=mask)
        ratio = tl.math.div_rn(exact, tl.broadcast_to(scale[:, :, None], exact.shape))
        ratio = tl.where(ratio == ratio, ratio, 0.0)
        rounded = ((ratio + _ROUND) - _ROUND).to(tl.int8)  # rounds halves to even, as torch does
        elements = tl.reshape(rounded, elements.shape)
    elif PAGE_TYPE == FP8:
        exact = elements.to(tl.float32)
        divisor = tl.full(exact.shape, 1.0, tl.float32) * fp8_scale
        if HEAD_SCALES:
            divisor *= tl.load(head_scales + head, mask=stored, other=1.0)[:, None]
        exact = tl.math.div_rn(exact, divisor)
        elements = round_to_fp8(exact).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    store_columns(to, elements, stored, 0, WIDTH, DIM)


@triton.jit
def write_pages_kernel(
    keys, values, key_scales, value_scales, head_scales, slots, k, v,
    key_head, key_block, key_row, value_head, value_block, value_row, k_row, k_head, v_row, v_head,
    heads, key_scale, value_scale,
    PAGE_SIZE: tl.constexpr, PAGE_TYPE: tl.constexpr, SHARED: tl.constexpr, HEAD_SCALES: tl.constexpr,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """A program per token and tile of HEADS heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        stored = head < heads
        elements = load_columns(k + token * k_row + head * k_head, stored, 0, KEY_WIDTH, KEY_DIM)
        write_rows(keys, key_scales, elements, slot, head, stored, key_head, key_block, key_row, key_scale,
                   head_scales, KEY_DIM, KEY_WIDTH, PAGE_SIZE, PAGE_TYPE, HEAD_SCALES)  # fmt: skip
        if not SHARED:
            elements = load_columns(v + token * v_row + head * v_head, stored, 0, VALUE_WIDTH, VALUE_DIM)
            write_rows(values, value_scales, elements, slot, head, stored, value_head, value_block, value_row,
                       value_scale, head_scales + heads, VALUE_DIM, VALUE_WIDTH, PAGE_SIZE, PAGE_TYPE,
                       HEAD_SCALES)  # fmt: skip


def write_pages(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    head_scales: Tensor | None = None,
) -> None:
    """Write new keys and values to their slots.

    Args:
        keys: pages (kv_heads, blocks, block_size, dim) of k's dtype, int8 or float8_e4m3fn, last stride 1, like values.
            Rows of int8 begin with their scales.
        slots: (tokens,) int32 or int64, block * block_size + offset; tokens with negative slots are not written.
        k: (tokens, kv_heads, dim) float32, float16 or bfloat16, last stride 1, like v.
        v: None if the values are a view of the keys.
        key_scale: of float8 keys, whose elements are those of k divided by it, like value_scale.
        head_scales: (2, kv_heads) float32, contiguous: the same for each head, of keys and values.
    """
    if not len(slots):
        return
    pages: Pages = as_pages(keys, values)
    v_or_k, kv_heads = k if v is None else v, keys.shape[0]
    widths = [triton.next_power_of_2(dim) for dim in (pages.key_dim, pages.value_dim)]
    heads = min(triton.next_power_of_2(kv_heads), max(1, _ELEMENTS // max(widths)))
    write_pages_kernel[(len(slots), triton.cdiv(kv_heads, heads))](
        pages.keys, pages.values, pages.key_scales, pages.value_scales, k if head_scales is None else head_scales,
        slots, k, v_or_k,
        *keys.stride()[:3], *values.stride()[:3], *k.stride()[:2], *v_or_k.stride()[:2],
        kv_heads, key_scale, value_scale,
        PAGE_SIZE=keys.shape[2], PAGE_TYPE=pages.page_type, SHARED=v is None, HEAD_SCALES=head_scales is not None,
        HEADS=heads, KEY_DIM=pages.key_dim, KEY_WIDTH=widths[0], VALUE_DIM=pages.value_dim, VALUE_WIDTH=widths[1],
    )  # fmt: skip


_STRIDES = (
    "key_head", "key_block", "key_row", "value_head", "value_block", "value_row", "k_row", "k_head", "v_row", "v_head",
)  # fmt: skip
VARIANTS = [
    KernelVariant(
        write_pages_kernel,
        dict.fromkeys(("keys", "values"), f"*{pages}")
        | dict.fromkeys(("key_scales", "value_scales", "head_scales"), "*fp32")
        | {"slots": "*i64", "k": "*bf16", "v": "*bf16"}
        | dict.fromkeys((*_STRIDES, "heads"), "i32")
        | dict.fromkeys(("key_scale", "value_scale"), "fp32"),
        {"PAGE_SIZE": 16, "PAGE_TYPE": page_type, "SHARED": False, "HEAD_SCALES": head_scales, "HEADS": 8,
         "KEY_DIM": 128, "KEY_WIDTH": 128, "VALUE_DIM": 128, "VALUE_WIDTH": 128},
        divisible=_STRIDES,
    )
    for pages, page_type, head_scales in (("bf16", 0, False), ("i8", 1, False), ("u8", 2, False), ("u8", 2, True))
]  # fmt: skip
