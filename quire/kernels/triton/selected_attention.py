"""Selection of the positions that tokens attend to; the twin of `quire.kernels.selected_attention.select_reference`.

A score is computed in a tile of positions that is fixed in the sequence. The selected positions are those above the
k-th largest score, which a search over the bits of scores finds: a token's result does not depend on the other tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import gpu
from quire.kernels.int8_pages import GROUP
from quire.kernels.triton.attention_tiles import INT8, as_pages, dot, load_columns, load_page_columns
from quire.kernels.triton.variants import KernelVariant
from quire.kernels.triton.vocab import ordered_key

SLICE_SCORES = 32 << 20  # that are kept at a time, 128 MiB, if one token has no more
_BLOCK_N, _BLOCK_H = 64, 16  # positions and heads of a tile
_BLOCK = 1024  # scores that a search reads at a time
_MIN_DIM = 16  # of operands of tl.dot
DIGIT = tl.constexpr(4)  # bits of a key that the search finds at a time
PIVOTS = tl.constexpr(16)  # values of a digit


@triton.jit(do_not_specialize=["top_k"])
def index_scores_kernel(
    queries, weights, keys, key_scales, tables, sequences, lengths, scores, query_row, query_head, weight_row,
    key_block, key_row, table_row, score_row, top_k,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_TYPE: tl.constexpr, IN_SEQUENCES: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program per token and tile of positions. Those of tokens that select nothing write nothing."""
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + token).to(tl.int32)
    begin = tl.program_id(1) * BLOCK_N
    if (length > top_k) & (begin < length):
        sequence = tl.load(sequences + token).to(tl.int64) if IN_SEQUENCES else token
        position = begin + tl.arange(0, BLOCK_N)
        inside = position < length
        block = tl.load(tables + sequence * table_row + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        offset = position % PAGE_SIZE
        rows = keys + block * key_block + offset * key_row
        scales = key_scales + block * (key_block // 4) + offset * (key_row // 4)
        k = load_page_columns(
            rows, scales, inside, FIRST, WIDTH, FIRST + DIM, PAGE_TYPE, queries.dtype.element_ty
        )  # fmt: skip
        total = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, HEADS, BLOCK_H):
            head = start + tl.arange(0, BLOCK_H)
            stored = head < HEADS
            q = load_columns(queries + token * query_row + head * query_head, stored, 0, WIDTH, DIM)
            products = dot(k, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_H], tl.float32), INTERPRETED)
            weight = tl.load(weights + token * weight_row + head, mask=stored, other=0.0)
            total += tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
        tl.store(scores + token * score_row + position, total, mask=inside)


@triton.jit
def load_keys(scores, at, length):
    """Keys of scores in their order, which are not negative, and which positions there are."""
    valid = at < length
    x = tl.load(scores + at, mask=valid, other=0.0)
    return ordered_key(tl.where(x == x, x, float("inf"))).to(tl.int64) + (1 << 31), valid


@triton.jit(do_not_specialize=["top_k"])
def choose_positions_kernel(scores, lengths, positions, score_row, top_k, BLOCK: tl.constexpr):
    """A program per token."""
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + token).to(tl.int32)
    scores += token * score_row
    positions += token * top_k
    if length <= top_k:
        for begin in range(0, top_k, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            tl.store(positions + at, at, mask=at < top_k)
    else:
        last = tl.full((), 0, tl.int64)  # the k-th largest key
        for step in range(8):
            pivots = last + (tl.arange(0, PIVOTS).to(tl.int64) << (28 - DIGIT * step))
            reached = tl.zeros((PIVOTS,), tl.int32)
            for begin in range(0, length, BLOCK):
                keys, valid = load_keys(scores, begin + tl.arange(0, BLOCK), length)
                reached += tl.sum(((keys[None, :] >= pivots[:, None]) & valid[None, :]).to(tl.int32), 1)
            enough = tl.sum((reached >= top_k).to(tl.int32), 0)  # of the first pivots
            last = tl.max(tl.where(tl.arange(0, PIVOTS) < enough, pivots, last), 0)
        above = tl.full((), 0, tl.int32)
        for begin in range(0, length, BLOCK):
            keys, valid = load_keys(scores, begin + tl.arange(0, BLOCK), length)
            above += tl.sum(((keys > last) & valid).to(tl.int32), 0)
        equal, stored = top_k - above, tl.full((), 0, tl.int32)
        for begin in range(0, length, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            keys, valid = load_keys(scores, at, length)
            same = (valid & (keys == last)).to(tl.int32)
            chosen = valid & ((keys > last) | ((same == 1) & (tl.cumsum(same, 0) <= equal)))
            place = stored + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(positions + place, at, mask=chosen)
            stored += tl.sum(chosen.to(tl.int32), 0)
            equal -= tl.minimum(tl.sum(same, 0), equal)


def supports(keys: Tensor, first: int, dim: int) -> bool:
    """Whether the kernels read the elements [first, first + dim) of the rows of pages."""
    width = triton.next_power_of_2(dim)
    aligned = keys.dtype is not torch.int8 or (first % GROUP == 0 and (width <= GROUP or dim % GROUP == 0))
    return keys.shape[0] == 1 and aligned


def select_positions(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    sequences: Tensor | None,
    lengths: Tensor,
    *,
    max_len: int,
    first: int,
    top_k: int,
) -> Tensor:
    """The positions with the highest scores; see `quire.kernels.selected_attention.select_positions`.

    `max_len`: no length is larger. It decides how many programs there are, and no bit of the result.
    """
    positions = torch.empty((len(queries), top_k), dtype=torch.int32, device=queries.device)
    size = max(1, SLICE_SCORES // max_len)
    for begin in range(0, len(queries), size):
        part = slice(begin, begin + size)
        scores = torch.empty((len(lengths[part]), max_len), dtype=torch.float32, device=queries.device)
        of_tokens = tables[part] if sequences is None else tables
        rows = None if sequences is None else sequences[part]
        _score(queries[part], weights[part], keys, of_tokens, rows, lengths[part], scores, first, top_k)
        choose_positions_kernel[(len(scores),)](
            scores, lengths[part], positions[part], scores.stride(0), top_k, BLOCK=_BLOCK, num_warps=4
        )
    return positions


def _score(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    sequences: Tensor | None,
    lengths: Tensor,
    scores: Tensor,
    first: int,
    top_k: int,
) -> None:
    pages, (count, heads, dim) = as_pages(keys, keys), queries.shape
    index_scores_kernel[(count, triton.cdiv(scores.shape[1], _BLOCK_N))](
        queries, weights, pages.keys, pages.key_scales, tables, lengths if sequences is None else sequences, lengths,
        scores, queries.stride(0), queries.stride(1), weights.stride(0), keys.stride(1), keys.stride(2),
        tables.stride(0), scores.stride(0), top_k, HEADS=heads, DIM=dim,
        WIDTH=max(_MIN_DIM, triton.next_power_of_2(dim)), FIRST=first, PAGE_SIZE=keys.shape[2],
        PAGE_TYPE=pages.page_type, IN_SEQUENCES=sequences is not None, INTERPRETED=gpu.is_interpreted(),
        BLOCK_N=_BLOCK_N, BLOCK_H=_BLOCK_H, num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip


_STRIDES = ("query_row", "query_head", "weight_row", "key_block", "key_row", "table_row", "score_row")


def _scores_variant(dtype: str, page: str, page_type: int, **features: bool) -> KernelVariant:
    signature: dict[str, str] = {"queries": f"*{dtype}", "keys": f"*{page}"}
    signature |= dict.fromkeys(("weights", "key_scales", "scores"), "*fp32") | {"tables": "*i32"}
    signature |= {"sequences": "*i64", "lengths": "*i64"} | dict.fromkeys((*_STRIDES, "top_k"), "i32")
    constants: dict[str, Any] = {
        "HEADS": 64, "DIM": 128, "WIDTH": 128, "FIRST": 576, "PAGE_SIZE": 16, "PAGE_TYPE": page_type,
        "IN_SEQUENCES": False, "INTERPRETED": False, "BLOCK_N": _BLOCK_N, "BLOCK_H": _BLOCK_H, **features,
    }  # fmt: skip
    return KernelVariant(index_scores_kernel, signature, constants, divisible=_STRIDES)


VARIANTS = [
    _scores_variant("bf16", "bf16", 0),
    _scores_variant("bf16", "bf16", 0, IN_SEQUENCES=True),
    _scores_variant("fp32", "fp32", 0),
    _scores_variant("bf16", "i8", INT8.value),
    _scores_variant("bf16", "u8", 2),
    KernelVariant(
        choose_positions_kernel,
        {"scores": "*fp32", "lengths": "*i64", "positions": "*i32", "score_row": "i32", "top_k": "i32"},
        {"BLOCK": _BLOCK},
    ),
]
