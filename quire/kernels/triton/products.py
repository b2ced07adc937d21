"""The inner loop of matrix products, which dense and grouped kernels share.

Formats of weights (size_out, size_in), and of the rows that they are multiplied with:

- "plain": both have the same floating-point dtype.
- "int4": integers with a scale for each output and group of 64 inputs, which rows in floating point are multiplied
  with. Of 128 inputs, the codes of the first group are the low halves of 64 bytes; a code is the integer plus 8.
- "scaled": both int8, or both float8_e4m3fn, with a scale for each output and one for each row.
- "blocks": both float8_e4m3fn; 128 inputs of a row share a scale, and 128 inputs of `SCALE_ROWS` outputs do.
- "groups": what checkpoints have: 4 or 8 bits whose groups of inputs share a scale, in the layout of
  `quire.kernels.triton.groups`. Values are rounded to the rows' dtype, as if the weight had been dequantized before.

A tile is (outputs, rows): outputs take the side of the tensor cores' instructions that is at least 64 wide, so that the
same instructions compute a row in a tile of 16 rows as in one of 128. A sum over inputs is cut into segments, whose
sums are added in their order. The cuts depend on the weight only; a launch for few rows computes segments at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.groups import Groups
from quire.kernels.triton.groups import group_codes, group_values
from quire.kernels.triton.tuning import config

GROUP = 64  # inputs of 4-bit weights that share a scale
_PAIR = 2 * GROUP  # inputs whose codes lie in the same bytes
BLOCK_INPUTS = 128  # that share a scale in the format "blocks"
_PROGRAMS = 256  # of a launch for few rows, about twice the multiprocessors of a large GPU
_MAX_SEGMENTS = 8
_MIN_SEGMENT = 512  # inputs


@triton.jit
def tile_product(
    x, x_rows, row_mask, x_stride, x_scales, x_scale_stride,
    weight, outputs, output_mask, weight_stride, scales, scale_stride, begin, end, size_in,
    minimums, factors, table,
    FORMAT: tl.constexpr, SCALE_ROWS: tl.constexpr,
    CODES: tl.constexpr, ZERO: tl.constexpr, MINIMUMS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Sums over the inputs from `begin` to `end`: (BLOCK_O, BLOCK_T), int32 for int8 rows, otherwise float32.

    x_rows (BLOCK_T,) int64 are the rows of x; outputs (BLOCK_O,) int64 those of the weight. EVEN: size_in is a multiple
    of BLOCK_K, so no loads are masked along the inputs. What `minimums`, `factors` and `table` are, and the constants
    that follow SCALE_ROWS, is said in `quire.kernels.triton.groups`.
    """
    if FORMAT == "int4":
        acc = _int4_product(
            x, x_rows, row_mask, x_stride, weight, outputs, output_mask, weight_stride, scales, scale_stride,
            begin, end, size_in, BLOCK_O, BLOCK_T, EVEN, INTERPRETED,
        )  # fmt: skip
    elif FORMAT == "groups":
        acc = _group_product(
            x, x_rows, row_mask, x_stride, weight, outputs, output_mask, weight_stride, scales, scale_stride,
            minimums, factors, table, begin, end, size_in,
            CODES, ZERO, MINIMUMS, GROUP, BLOCK_O, BLOCK_T, EVEN, INTERPRETED,
        )  # fmt: skip
    elif FORMAT == "blocks":
        acc = _blocks_product(
            x, x_rows, row_mask, x_stride, x_scales, x_scale_stride,
            weight, outputs, output_mask, weight_stride, scales, scale_stride,
            begin, end, size_in, SCALE_ROWS, BLOCK_O, BLOCK_T, BLOCK_K, EVEN, INTERPRETED,
        )  # fmt: skip
    else:
        acc = _direct_product(
            x, x_rows, row_mask, x_stride, weight, outputs, output_mask, weight_stride,
            begin, end, size_in, FORMAT, BLOCK_O, BLOCK_T, BLOCK_K, EVEN, INTERPRETED,
        )  # fmt: skip
    return acc


@triton.jit
def _load(base, rows, row_mask, stride, columns, end, EVEN: tl.constexpr):
    """(rows, columns) of a matrix; zeros where masked."""
    addresses = base + rows[:, None] * stride + columns[None, :]
    if EVEN:
        return tl.load(addresses, mask=row_mask[:, None], other=0.0)
    return tl.load(addresses, mask=row_mask[:, None] & (columns[None, :] < end), other=0.0)


@triton.jit
def _dot(w, x, acc, INTERPRETED: tl.constexpr):
    """acc + w x^T, in full precision of float32. w has x's dtype or is integers.

    The interpreter takes bits of bfloat16 for integers.
    """
    if w.dtype == tl.int8 and x.dtype == tl.int8:
        acc = tl.dot(w, tl.trans(x), acc, out_dtype=tl.int32)
    elif INTERPRETED:
        acc = tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), acc, input_precision="ieee")
    elif w.dtype == tl.float8e4nv:
        # Hopper adds products of float8 with 14 bits: after these many they are added to float32 sums.
        acc = tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=w.shape[1])
    else:
        acc = tl.dot(w.to(x.dtype), tl.trans(x), acc, input_precision="ieee")
    return acc


@triton.jit
def _direct_product(
    x, x_rows, row_mask, x_stride, weight, outputs, output_mask, weight_stride, begin, end, size_in,
    FORMAT: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    INTEGERS: tl.constexpr = FORMAT == "scaled" and weight.dtype.element_ty == tl.int8
    acc = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.int32 if INTEGERS else tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        w = _load(weight, outputs, output_mask, weight_stride, columns, size_in, EVEN)
        rows = _load(x, x_rows, row_mask, x_stride, columns, size_in, EVEN)
        acc = _dot(w, rows, acc, INTERPRETED)
    return acc


@triton.jit
def _int4_product(
    x, x_rows, row_mask, x_stride, weight, outputs, output_mask, weight_stride, scales, scale_stride,
    begin, end, size_in, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Sums of integers are scaled group by group."""
    acc = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
    inner = tl.arange(0, 64)
    for start in tl.range(begin, end, 128):
        codes = _load(weight, outputs, output_mask, weight_stride, start // 2 + inner, size_in, True).to(tl.int32)
        for half in tl.static_range(2):
            rows = _load(x, x_rows, row_mask, x_stride, start + half * 64 + inner, size_in, EVEN)
            integers = ((codes >> (4 * half)) & 15) - 8
            sums = _dot(integers, rows, tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32), INTERPRETED)
            scale = tl.load(scales + outputs * scale_stride + start // 64 + half, mask=output_mask, other=0.0)
            acc += sums * scale[:, None]
    return acc


@triton.jit
def _group_product(
    x, x_rows, row_mask, x_stride, weight, outputs, output_mask, weight_stride, scales, scale_stride,
    minimums, factors, table, begin, end, size_in,
    CODES: tl.constexpr, ZERO: tl.constexpr, MINIMUMS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Weights are dequantized in the tile."""
    acc = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
    inner = tl.arange(0, 64)
    factor = tl.load(factors + outputs, mask=output_mask, other=0.0)
    for start in tl.range(begin, end, 128):
        codes = group_codes(weight, outputs, output_mask, weight_stride, start // (64 if CODES == "int8" else 128))
        for half in tl.static_range(2):
            inputs = start + half * 64
            if CODES == "int8" and half == 1:
                codes = group_codes(weight, outputs, output_mask, weight_stride, inputs // 64)
            w = group_values(
                codes, inputs, outputs, output_mask, scales, minimums, scale_stride, factor, table,
                half, CODES, ZERO, MINIMUMS, GROUP, BLOCK_O,
            )  # fmt: skip
            rows = _load(x, x_rows, row_mask, x_stride, inputs + inner, size_in, EVEN)
            acc = _dot(w.to(rows.dtype), rows, acc, INTERPRETED)
    return acc


@triton.jit
def _blocks_product(
    x, x_rows, row_mask, x_stride, x_scales, x_scale_stride,
    weight, outputs, output_mask, weight_stride, scales, scale_stride, begin, end, size_in,
    SCALE_ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        w = _load(weight, outputs, output_mask, weight_stride, columns, size_in, EVEN)
        rows = _load(x, x_rows, row_mask, x_stride, columns, size_in, EVEN)
        sums = _dot(w, rows, tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32), INTERPRETED)
        group = start // BLOCK_K
        scale = tl.load(scales + (outputs // SCALE_ROWS) * scale_stride + group, mask=output_mask, other=0.0)
        row_scale = tl.load(x_scales + x_rows * x_scale_stride + group, mask=row_mask, other=0.0)
        acc += sums * scale[:, None] * row_scale[None, :]
    return acc


@triton.jit
def finish(
    values, x_rows, row_mask, x_scales, outputs, output_mask, scales, bias,
    FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Scale sums (rows, outputs), add the bias and apply the activation; float32."""
    values = values.to(tl.float32)
    if FORMAT == "scaled":
        values *= tl.load(x_scales + x_rows, mask=row_mask, other=0.0)[:, None]
        values *= tl.load(scales + outputs, mask=output_mask, other=0.0)[None, :]
    if HAS_BIAS:
        values += tl.load(bias + outputs, mask=output_mask, other=0.0).to(tl.float32)[None, :]
    return _activated(values, ACT)


@triton.jit
def _activated(x, ACT: tl.constexpr):
    if ACT == "silu":
        x = x * tl.sigmoid(x)
    elif ACT == "quick_gelu":
        x = x * tl.sigmoid(1.702 * x)
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":  # 0.5 (1 + tanh(y)) is sigmoid(2 y)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # keeps NaN
    return x


def group_constants(
    codes: str | None = None, zero: int = 0, *, minimums: bool = False, group: int = 0
) -> Mapping[str, Any]:
    """The constants of kernels that only weights in groups need; see `quire.kernels.triton.groups`."""
    return {"CODES": codes, "ZERO": zero, "MINIMUMS": minimums, "GROUP": group}


def group_arguments(groups: Groups | None, none: Tensor) -> Mapping[str, Any]:
    """The arguments of kernels that only weights in groups need. `none`: where the kernel reads nothing."""
    if groups is None:
        return {"minimums": none, "factors": none, "table": none, **group_constants()}
    has_minimums = groups.minimums is not None
    return {
        "minimums": none if groups.minimums is None else groups.minimums,
        "factors": groups.factors,
        "table": none if groups.table is None else groups.table,
        **group_constants(groups.codes, groups.zero, minimums=has_minimums, group=groups.group),
    }


def block_inputs(x: Tensor, kind: str) -> int:
    """Inputs of a tile: 128 bytes of a row, or those of weights whose tiles are unpacked."""
    return _PAIR if kind in ("int4", "groups") else BLOCK_INPUTS // x.itemsize


def segment_inputs(size_out: int, size_in: int, block: int) -> tuple[int, int]:
    """How many segments the sums of a weight have, and inputs of each but the last, a multiple of `block`."""
    segments = min(_PROGRAMS // -(-size_out // 64), _MAX_SEGMENTS, size_in // _MIN_SEGMENT)
    unit = max(block, _PAIR)
    inputs = -(-size_in // (max(segments, 1) * unit)) * unit
    return max(1, -(-size_in // inputs)), inputs


def tile_sizes(rows: int, device: torch.device, kind: str, bits: int) -> Mapping[str, int]:
    """Tiles for products with this many rows (of a weight, or on average of an expert's), warps and stages.

    Only BLOCK_O and BLOCK_T of a tile, which do not change a row's sums, may depend on the rows. `bits`: of an element
    of a row. Rules with fewer sums in a tile are for formats that need the registers for other things.
    """
    return config("products", "tile", device, rows=triton.next_power_of_2(max(rows, 1)), kind=kind, bits=bits)
