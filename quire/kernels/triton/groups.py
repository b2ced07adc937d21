"""Weights in groups of inputs: their values in a tile of a product, and rows of them.

The codes of 64 outputs and 64 bytes of inputs lie together, row by row: (size_out / 64, units, 64, 64), padded. A unit
is 128 inputs of 4 bits, the first 64 in the low halves of bytes, or 64 inputs of 8 bits; there are whole blocks of 128
inputs. Scales and minimums are float16, (groups, size_out), times a factor for each output, a power of two.

The value of a code in a group is code * scale + minimum in float32, rounded once; without minimums (code - ZERO) *
scale. CODES says what a code is: "int4" (0 to 15), "int8", "e2m1" (a float of 4 bits), or "table" (a place among 16).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.groups import Groups
from quire.kernels.triton.variants import KernelVariant

_ROWS = 16  # that a program reads


@triton.jit
def group_codes(weight, outputs, output_mask, weight_stride, unit):
    """The bytes of a unit: (outputs, 64)."""
    rows = (outputs // 64) * weight_stride + (outputs % 64) * 64
    addresses = weight + rows[:, None] + unit * 4096 + tl.arange(0, 64)[None, :]
    return tl.load(addresses, mask=output_mask[:, None], other=0)


@triton.jit
def group_values(
    codes, start, outputs, output_mask, scales, minimums, scale_stride, factors, table,
    HALF: tl.constexpr, CODES: tl.constexpr, ZERO: tl.constexpr, MINIMUMS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_O: tl.constexpr,
):  # fmt: skip
    """The values of 64 inputs from `start` on: (BLOCK_O, 64) float32.

    Args:
        codes: the bytes of their unit.
        factors: (BLOCK_O,) values, not where they are.
        HALF: of the bytes, that has codes of 4 bits.
    """
    SPAN: tl.constexpr = GROUP if GROUP < 64 else 64  # inputs with the same scale
    SPANS: tl.constexpr = 64 // SPAN
    places = (start // GROUP + tl.arange(0, SPANS))[None, :] * scale_stride + outputs[:, None]
    scale = tl.load(scales + places, mask=output_mask[:, None], other=0.0).to(tl.float32) * factors[:, None]
    if MINIMUMS:
        least = tl.load(minimums + places, mask=output_mask[:, None], other=0.0).to(tl.float32) * factors[:, None]
    else:
        least = scale * (-ZERO)
    if CODES == "int4":
        # As the highest bits of a mantissa a code is 1 + code / 16, without a conversion. 16 * scale and what that is
        # too much are exact, so that the sum below is rounded once.
        bits = ((codes.to(tl.int32) << (19 - 4 * HALF)) & 0x780000) | 0x3F800000
        values = bits.to(tl.float32, bitcast=True)
        scale *= 16.0
        least -= scale
    elif CODES == "int8":
        values = codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        code = (codes.to(tl.int32) >> (4 * HALF)) & 15
        if CODES == "e2m1":  # its exponent and mantissa are those of a float32 that is 2^126 times smaller
            bits = ((code & 7) << 22) | ((code & 8) << 28)
            values = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
        else:
            values = tl.load(table + code)
    spans = tl.reshape(values, (BLOCK_O, SPANS, SPAN)) * scale[:, :, None]
    if MINIMUMS or ZERO != 0 or CODES == "int4":
        spans += least[:, :, None]
    return tl.reshape(spans, (BLOCK_O, 64))


@triton.jit(do_not_specialize=["rows"])
def group_rows_kernel(
    weight, scales, minimums, factors, table, indices, out, rows, size_in, weight_stride, scale_stride, out_stride,
    CODES: tl.constexpr, ZERO: tl.constexpr, MINIMUMS: tl.constexpr, GROUP: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """One program per block of rows and 128 inputs."""
    places = (tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    mask = places < rows
    outputs = tl.load(indices + places, mask=mask, other=0).to(tl.int64)
    factor = tl.load(factors + outputs)
    start = tl.program_id(1) * 128
    for half in tl.static_range(2):
        inputs = start + half * 64
        codes = group_codes(weight, outputs, mask, weight_stride, inputs // 64 if CODES == "int8" else start // 128)
        values = group_values(
            codes, inputs, outputs, mask, scales, minimums, scale_stride, factor, table,
            half, CODES, ZERO, MINIMUMS, GROUP, BLOCK_O,
        )  # fmt: skip
        columns = inputs + tl.arange(0, 64)
        target = out + places[:, None] * out_stride + columns[None, :]
        tl.store(target, values.to(out.dtype.element_ty), mask=mask[:, None] & (columns[None, :] < size_in))


def group_rows(values: Tensor, scales: Tensor, groups: Groups, indices: Tensor, out: Tensor) -> Tensor:
    """Rows of a weight by their indices, dequantized to `out` (n, size_in), which is returned.

    Inputs stay in the weight's order.
    """
    rows, size_in = out.shape
    if rows:
        none = values  # where the kernel reads nothing
        group_rows_kernel[(-(-rows // _ROWS), -(-size_in // 128))](
            values, scales, none if groups.minimums is None else groups.minimums, groups.factors,
            none if groups.table is None else groups.table, indices, out, rows, size_in,
            values.stride(0), scales.stride(0), out.stride(0),
            CODES=groups.codes, ZERO=groups.zero, MINIMUMS=groups.minimums is not None, GROUP=groups.group,
            BLOCK_O=_ROWS,
        )  # fmt: skip
    return out


def _variant(codes: str, group: int, *, minimums: bool) -> KernelVariant:
    pointers = {"weight": "*u8", "scales": "*fp16", "minimums": "*fp16", "factors": "*fp32", "table": "*fp32"}
    numbers = dict.fromkeys(("rows", "size_in", "weight_stride", "scale_stride", "out_stride"), "i32")
    return KernelVariant(
        group_rows_kernel,
        {**pointers, "indices": "*i64", "out": "*bf16", **numbers},
        {"CODES": codes, "ZERO": 0, "MINIMUMS": minimums, "GROUP": group, "BLOCK_O": _ROWS},
        divisible=("size_in", "weight_stride", "scale_stride", "out_stride"),
    )


VARIANTS = [_variant("int4", 32, minimums=True), _variant("int8", 128, minimums=False)]
