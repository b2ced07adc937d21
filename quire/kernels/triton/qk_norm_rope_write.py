"""Norm and rotary embedding of heads, and the write of keys and values; the twin of `quire.kernels.qk_norm_rope_write`.

It computes in the order of the two ops that it replaces, and rounds keys before it writes them, so that a layer's pages
and queries have the same bits either way.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.projected_heads import CosSin, QKNormWeights
from quire.kernels.triton.attention_tiles import as_pages, load_columns, store_columns
from quire.kernels.triton.rope import norm_and_rotate, norm_and_rotate_arguments, tile_heads
from quire.kernels.triton.variants import KernelVariant
from quire.kernels.triton.write_pages import write_rows

_ELEMENTS = 1024  # of the heads of a program, at least one head


@triton.jit
def qk_norm_rope_write_kernel(
    x, q, cos, sin, q_weight, k_weight, keys, values, key_scales, value_scales, head_scales, slots,
    token_stride, head_stride, key_head, key_block, key_row, value_head, value_block, value_row,
    q_heads, kv_heads, pairs, eps, offset, key_scale, value_scale,
    NORM: tl.constexpr, ROTATE: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_TYPE: tl.constexpr, HEAD_SCALES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program per token and tile of HEADS heads, of queries or of keys together with their values."""
    token = tl.program_id(0).to(tl.int64)
    is_query, head, stored = tile_heads(tl.program_id(1), q_heads, q_heads + kv_heads, HEADS)
    weight = k_weight
    if is_query:
        weight = q_weight
    rows = x + token * token_stride + head * head_stride
    inside = stored[:, None] & (tl.arange(0, WIDTH) < DIM)[None, :]
    rotated = norm_and_rotate(
        rows, inside, weight, cos + token * pairs, sin + token * pairs, DIM, pairs, eps, offset,
        NORM, ROTATE, INTERLEAVED, WIDTH,
    )  # fmt: skip
    rotated = tl.where(inside, rotated, 0.0).to(x.dtype.element_ty)
    if is_query:
        store_columns(q + (token * q_heads + head) * DIM, rotated, stored, 0, WIDTH, DIM)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            kv_head = (head - q_heads).to(tl.int64)
            write_rows(keys, key_scales, rotated, slot, kv_head, stored, key_head, key_block, key_row, key_scale,
                       head_scales, DIM, WIDTH, PAGE_SIZE, PAGE_TYPE, HEAD_SCALES)  # fmt: skip
            new_values = load_columns(rows + kv_heads * head_stride, stored, 0, WIDTH, DIM)
            write_rows(values, value_scales, new_values, slot, kv_head, stored, value_head, value_block, value_row,
                       value_scale, head_scales + kv_heads, DIM, WIDTH, PAGE_SIZE, PAGE_TYPE, HEAD_SCALES)  # fmt: skip


def qk_norm_rope_write(
    x: Tensor,
    q_heads: int,
    norms: QKNormWeights | None,
    angles: CosSin | None,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    *,
    key_scale: float,
    value_scale: float,
    head_scales: Tensor | None = None,
) -> Tensor:
    """Norm and rotate the heads of queries and keys, and write keys and values to their slots.

    Args:
        x: (tokens, q_heads + 2 * kv_heads, dim) float32, float16 or bfloat16, last stride 1: queries, keys, values.
        keys: pages (kv_heads, blocks, block_size, dim) of x's dtype, int8 or float8_e4m3fn, last stride 1, like values.
            Rows of int8 begin with their scales.
        slots: (tokens,) int32 or int64, block * block_size + offset; of tokens with negative slots only the queries
            are computed.
        key_scale: of float8 keys, whose elements are divided by it, like value_scale.
        head_scales: (2, kv_heads) float32, contiguous: the same for each head, of keys and values.

    Returns:
        (tokens, q_heads, dim) queries, as x, contiguous.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    tokens, heads, dim = x.shape
    kv_heads = (heads - q_heads) // 2
    q = torch.empty((tokens, q_heads, dim), dtype=x.dtype, device=x.device)
    if not tokens:
        return q
    pages, width = as_pages(keys, values), triton.next_power_of_2(dim)
    group = min(triton.next_power_of_2(max(q_heads, kv_heads)), max(1, _ELEMENTS // width))
    tiles = triton.cdiv(q_heads, group) + triton.cdiv(kv_heads, group)
    qk_norm_rope_write_kernel[(tokens, tiles)](
        x, q, keys=pages.keys, values=pages.values, key_scales=pages.key_scales, value_scales=pages.value_scales,
        head_scales=x if head_scales is None else head_scales, slots=slots, token_stride=x.stride(0),
        head_stride=x.stride(1),
        **dict(zip(_PAGE_STRIDES, (*keys.stride()[:3], *values.stride()[:3]), strict=True)),
        q_heads=q_heads, kv_heads=kv_heads, key_scale=key_scale, value_scale=value_scale,
        **norm_and_rotate_arguments(x, norms, angles),
        PAGE_SIZE=keys.shape[2], PAGE_TYPE=pages.page_type, HEAD_SCALES=head_scales is not None, HEADS=group, DIM=dim,
        WIDTH=width,
        num_warps=4 if group * width >= _ELEMENTS else 1,
    )  # fmt: skip
    return q


_PAGE_STRIDES = ("key_head", "key_block", "key_row", "value_head", "value_block", "value_row")
_STRIDES = ("token_stride", "head_stride", *_PAGE_STRIDES)


def _variant(
    pages: str = "bf16",
    page_type: int = 0,
    *,
    norm: bool = True,
    rotate: bool = True,
    interleaved: bool = False,
    head_scales: bool = False,
) -> KernelVariant:
    return KernelVariant(
        qk_norm_rope_write_kernel,
        dict.fromkeys(("x", "q", "q_weight", "k_weight"), "*bf16")
        | dict.fromkeys(("cos", "sin"), "*fp32" if rotate else "*bf16")
        | dict.fromkeys(("keys", "values"), f"*{pages}")
        | dict.fromkeys(("key_scales", "value_scales", "head_scales"), "*fp32")
        | {"slots": "*i64"}
        | dict.fromkeys((*_STRIDES, "q_heads", "kv_heads", "pairs"), "i32")
        | dict.fromkeys(("eps", "offset", "key_scale", "value_scale"), "fp32"),
        {"NORM": norm, "ROTATE": rotate, "INTERLEAVED": interleaved, "PAGE_SIZE": 16, "PAGE_TYPE": page_type,
         "HEAD_SCALES": head_scales, "HEADS": 8, "DIM": 128, "WIDTH": 128},
        divisible=_STRIDES,
    )  # fmt: skip


VARIANTS = [
    *(_variant(pages, page_type) for pages, page_type in (("bf16", 0), ("i8", 1), ("u8", 2))),
    _variant("u8", 2, head_scales=True),
    _variant(norm=False),
    _variant(norm=False, interleaved=True),
    _variant(rotate=False),
]
VARIANTS.append(  # one head of keys; Triton makes integers that are 1 constants
    replace(
        VARIANTS[0],
        signature={name: kind for name, kind in VARIANTS[0].signature.items() if name != "kv_heads"},
        constants={**VARIANTS[0].constants, "kv_heads": 1, "HEADS": 4, "DIM": 256, "WIDTH": 256},
    )
)
