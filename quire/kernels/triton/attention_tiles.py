"""Parts of the attention kernels: one tile of queries attends to one range of keys.

Softmax is computed online (Milakov and Gimelshein 2018; Dao et al. 2022), in float32 and to the base 2. A row of a tile
is one head of one query. All tiles execute the same code, and ranges of keys are cut at fixed positions of a sequence,
so a row has the same bits whatever the other rows are.

Head sizes that are no powers of two are a main part and a tail, powers of two both: 576 = 512 + 64, 80 = 64 + 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.int8_pages import GROUP, SCALE, row_dim
from quire.kernels.triton import tuning
from quire.kernels.triton.numerics import tanh

TABLE = "attention"  # of `tuning`
PLAIN = tl.constexpr(0)  # pages of the queries' kind of dtype
INT8 = tl.constexpr(1)  # int8 with the scales of each row in front of it, that of the last group first
FP8 = tl.constexpr(2)  # float8_e4m3fn
LOG2E = tl.constexpr(1.4426950408889634)
SCALE_GROUP = tl.constexpr(GROUP)  # elements of int8 rows that share a scale
_MIN_DIM = 16  # of operands of tl.dot


@triton.jit
def load_columns(rows, seen, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """(rows, WIDTH): columns from START on of the rows at pointers `rows`; zeros where not `seen` and from DIM on."""
    columns = START + tl.arange(0, WIDTH)
    mask = seen[:, None]
    if START + WIDTH > DIM:
        mask = mask & (columns < DIM)[None, :]
    return tl.load(rows[:, None] + columns[None, :], mask=mask, other=0)


@triton.jit
def store_columns(rows, tile, stored, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """The reverse of `load_columns`."""
    columns = START + tl.arange(0, WIDTH)
    mask = stored[:, None] & (columns < DIM)[None, :]
    tl.store(rows[:, None] + columns[None, :], tile.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    """acc + a @ b in float32."""
    if INTERPRETED:  # which takes the bits of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def load_scales(rows, seen, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """The scales of columns from START on of int8 rows, (rows, WIDTH) or (rows, 1).

    Args:
        rows: pointers to the scale of each row's first group, behind those of the others.
        START, WIDTH: powers of two; START may be 0.
    """
    if WIDTH <= SCALE_GROUP:  # columns of one group
        scales = tl.load(rows - START // SCALE_GROUP, mask=seen, other=0.0)[:, None]
    else:
        groups: tl.constexpr = WIDTH // SCALE_GROUP
        group = START // SCALE_GROUP + tl.arange(0, groups)
        mask = seen[:, None] & (group * SCALE_GROUP < DIM)[None, :]
        of_groups = tl.load(rows[:, None] - group[None, :], mask=mask, other=0.0)
        spread = tl.broadcast_to(of_groups[:, :, None], (rows.shape[0], groups, SCALE_GROUP))
        scales = tl.reshape(spread, (rows.shape[0], WIDTH))
    return scales


@triton.jit
def load_page_columns(
    rows, scales, seen, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, PAGE_TYPE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """`load_columns` of rows of pages, in DTYPE; of int8 rows times their `scales`, see `load_scales`."""
    tile = load_columns(rows, seen, START, WIDTH, DIM)
    if PAGE_TYPE == FP8:
        tile = tile.to(tl.float8e4nv, bitcast=True)
    if PAGE_TYPE == INT8:
        tile = tile.to(tl.float32) * load_scales(scales, seen, START, WIDTH, DIM)
    return tile.to(DTYPE)


@triton.jit
def scaled_scores(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores to the base 2. With a softcap they are softcap * tanh(scale * products / softcap)."""
    if SOFTCAP:
        return tanh(products * (scale / softcap)) * (softcap * LOG2E)
    return products * (scale * LOG2E)


@triton.jit
def online_softmax(scores, top, total):
    """One step: weights of a tile's scores, the factor of earlier sums, the new largest score, the new sum."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(top - base)
    return weights, factor, new_top, total * factor + tl.sum(weights, 1)


@triton.jit
def normalizer(top, total, sinks, SINKS: tl.constexpr):
    """What sums of weighted values are multiplied by; 0 for rows without keys.

    sinks: logit of each row that takes part in the softmax without a value.
    """
    if SINKS:
        sink = sinks * LOG2E
        base = tl.maximum(top, sink)
        weight = tl.exp2(top - base)
        return weight / (total * weight + tl.exp2(sink - base))
    return tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))


@triton.jit
def find_sequence(starts, count, tile, QUERIES: tl.constexpr):
    """The sequence of a tile of up to QUERIES queries, and the tile's first query in it.

    starts: (count + 1,) where each sequence begins. Sequence i has the tiles from (starts[i] - starts[0]) // QUERIES
    + i on, of which the last ones may be empty: their first query is past the sequence's end.
    """
    low, high = 0, count
    origin = tl.load(starts).to(tl.int32)
    while low < high:
        middle = (low + high) // 2
        if (tl.load(starts + middle).to(tl.int32) - origin) // QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    return sequence, (tile - sequence - (tl.load(starts + sequence).to(tl.int32) - origin) // QUERIES) * QUERIES


@triton.jit
def attend_pages(
    q, q_tail, last, slopes, keys, values, key_scales, value_scales, table, key_block, key_row, value_block,
    value_row, first, begin, end, scale, softcap, window, biases, reach, earliest, past,
    KEY_DIM: tl.constexpr, KEY_MAIN: tl.constexpr, KEY_TAIL: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_MAIN: tl.constexpr, VALUE_TAIL: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_TYPE: tl.constexpr,
    BLOCK_N: tl.constexpr, SHARED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, BIAS: tl.constexpr, VISIBLE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries to the positions [first, end) of a sequence, of which [begin, end) are visited.

    Args:
        q: (rows, main) queries of one KV head, q_tail: (rows, tail).
        last: (rows,) position of each query, which CAUSAL, WINDOW, ALIBI and BIAS use.
        slopes: (rows,) of ALiBi.
        keys: pointer to the pages of the KV head, like values; key_scales, value_scales: to the scale of
            the first group of int8 rows.
        table: pointer to the sequence's blocks; without pages (PAGE_SIZE 0) not used, and keys points to its first row.
        window: the least distance of positions that a query does not attend to.
        biases: (rows,) pointers to biases by distance, reach + clamp(key - query, -reach, reach).
        earliest, past: (rows,) the first position that each query attends to, and the one behind the last; VISIBLE
            uses them, in place of CAUSAL and WINDOW.
        KEY_MAIN, KEY_TAIL: parts of KEY_DIM, see the module; the same for values.
        SHARED: values are the main part of keys.

    Returns:
        (rows, main) and (rows, tail) float32 sums of weighted values, (rows,) largest scores, (rows,) sums of weights.
    """
    acc = tl.zeros([q.shape[0], VALUE_MAIN], tl.float32)
    acc_tail = tl.zeros([q.shape[0], VALUE_TAIL if VALUE_TAIL > 0 else 1], tl.float32)
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    for start in range(begin, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        inside = (position >= first) & (position < end)
        if PAGE_SIZE == 0:
            block, offset = tl.zeros([BLOCK_N], tl.int64), position.to(tl.int64)
        else:
            block = tl.load(table + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
            offset = position % PAGE_SIZE
        rows = keys + block * key_block + offset * key_row
        scales = key_scales + block * (key_block // 4) + offset * (key_row // 4)
        k_main = load_page_columns(rows, scales, inside, 0, KEY_MAIN, KEY_DIM, PAGE_TYPE, q.dtype)
        products = dot(q, tl.trans(k_main), tl.zeros([q.shape[0], BLOCK_N], tl.float32), INTERPRETED)
        if KEY_TAIL > 0:
            k_tail = load_page_columns(rows, scales, inside, KEY_MAIN, KEY_TAIL, KEY_DIM, PAGE_TYPE, q.dtype)
            products = dot(q_tail, tl.trans(k_tail), products, INTERPRETED)
        scores = scaled_scores(products, scale, softcap, SOFTCAP)
        distance = position[None, :] - last[:, None]
        if ALIBI:
            scores -= (slopes * LOG2E)[:, None] * tl.abs(distance).to(tl.float32)
        if BIAS:
            nearest = tl.minimum(tl.maximum(distance, -reach), reach) + reach
            scores += tl.load(biases[:, None] + nearest) * LOG2E
        seen = inside[None, :]
        if VISIBLE:
            seen = seen & (position[None, :] >= earliest[:, None]) & (position[None, :] < past[:, None])
        else:
            if CAUSAL:
                seen = seen & (distance <= 0)
            if WINDOW:
                seen = seen & (tl.abs(distance) < window)
        weights, factor, top, total = online_softmax(tl.where(seen, scores, float("-inf")), top, total)
        rows = values + block * value_block + offset * value_row
        scales = value_scales + block * (value_block // 4) + offset * (value_row // 4)
        v = k_main if SHARED else load_page_columns(rows, scales, inside, 0, VALUE_MAIN, VALUE_DIM, PAGE_TYPE, q.dtype)
        acc = dot(weights.to(q.dtype), v, acc * factor[:, None], INTERPRETED)
        if VALUE_TAIL > 0:
            v_tail = load_page_columns(rows, scales, inside, VALUE_MAIN, VALUE_TAIL, VALUE_DIM, PAGE_TYPE, q.dtype)
            acc_tail = dot(weights.to(q.dtype), v_tail, acc_tail * factor[:, None], INTERPRETED)
    return acc, acc_tail, top, total


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of a layer as kernels take them.

    Attributes:
        keys: (kv_heads, blocks, block_size, dim) elements, like values.
        key_scales: the scales of the first groups of int8 rows, (kv_heads, blocks, block_size, 1), which those of
            other groups precede, like value_scales; elsewhere any tensor.
        page_type: `PLAIN`, `INT8` or `FP8`.
        sizes: see `head_sizes`.
        shared: values are the main part of keys.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor
    page_type: int
    sizes: Mapping[str, int]
    shared: bool

    @property
    def key_dim(self) -> int:
        """Elements of a key."""
        return self.keys.shape[3]

    @property
    def value_dim(self) -> int:
        """Elements of a value."""
        return self.values.shape[3]


def as_pages(keys: Tensor, values: Tensor) -> Pages:
    """The pages (kv_heads, blocks, block_size, dim) of any dtype that kernels read; see `quire.kernels.int8_pages`."""
    page_type, scales = PLAIN.value, (keys, values)
    if keys.dtype is torch.int8:
        page_type = INT8.value
        (keys, key_scales), (values, value_scales) = _split_rows(keys), _split_rows(values)
        scales = key_scales, value_scales
    elif keys.dtype is torch.float8_e4m3fn:
        page_type, keys, values = FP8.value, keys.view(torch.uint8), values.view(torch.uint8)
    sizes = head_sizes(keys.shape[3], values.shape[3])
    same = keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
    shared = same and sizes["KEY_MAIN"] == sizes["VALUE_MAIN"] and sizes["VALUE_TAIL"] == 0
    return Pages(keys, values, *scales, page_type, sizes, shared)


def _split_rows(pages: Tensor) -> tuple[Tensor, Tensor]:
    """The elements of int8 rows, and the scales of their first groups."""
    first = pages.shape[3] - row_dim(pages.shape[3])
    return pages[..., first:], pages[..., first - SCALE : first].view(torch.float32)


def page_config(kernel: str, q: Tensor, pages: Pages) -> Mapping[str, int]:
    """The arguments of a kernel for queries that attend to pages; see `tuning.config`."""
    width = max(pages.key_dim, pages.value_dim)
    return tuning.config(TABLE, kernel, q.device, width=width, bits=8 * q.itemsize, page=pages.page_type)


def head_sizes(key_dim: int, value_dim: int) -> dict[str, int]:
    """The constants of kernels for the sizes of heads: of keys and values the size, its main part and its tail."""
    sizes: dict[str, int] = {}
    for name, dim in (("KEY", key_dim), ("VALUE", value_dim)):
        whole = max(_MIN_DIM, triton.next_power_of_2(dim))
        main = whole if whole == dim else max(_MIN_DIM, whole // 2)
        tail = max(_MIN_DIM, triton.next_power_of_2(dim - main)) if main < dim else 0
        if main + tail >= whole:
            main, tail = whole, 0
        sizes |= {f"{name}_DIM": dim, f"{name}_MAIN": main, f"{name}_TAIL": tail}
    return sizes
