"""Products of rows with one weight, in all formats of `quire.kernels.triton.products`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import gpu
from quire.kernels.groups import Groups
from quire.kernels.triton.products import (
    block_inputs,
    finish,
    group_arguments,
    group_constants,
    segment_inputs,
    tile_product,
    tile_sizes,
)
from quire.kernels.triton.variants import KernelVariant

_PARALLEL_ROWS = 64  # up to which a launch computes the segments of a sum at once
_REDUCED = 256  # outputs of a program that adds segments


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    x, x_scales, weight, scales, minimums, factors, table, bias, out, rows, size_out, size_in, segments, segment,
    x_stride, x_scale_stride, weight_stride, scale_stride, out_stride,
    FORMAT: tl.constexpr, SCALE_ROWS: tl.constexpr,
    CODES: tl.constexpr, ZERO: tl.constexpr, MINIMUMS: tl.constexpr, GROUP: tl.constexpr, PARTIAL: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program per tile. PARTIAL: per tile and segment, and out (segments, rows, size_out) gets plain sums."""
    tiles_o, tiles_t = tl.cdiv(size_out, BLOCK_O), tl.cdiv(rows, BLOCK_T)
    tile = tl.program_id(0)
    tile_o, tile_t = tl.swizzle2d(tile // tiles_t, tile % tiles_t, tiles_o, tiles_t, 8)
    outputs = (tile_o * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    indices = (tile_t * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    output_mask, row_mask = outputs < size_out, indices < rows
    mask = row_mask[:, None] & output_mask[None, :]
    if PARTIAL:
        part = tl.program_id(1).to(tl.int64)
        begin = tl.program_id(1) * segment
        sums = tile_product(
            x, indices, row_mask, x_stride, x_scales, x_scale_stride,
            weight, outputs, output_mask, weight_stride, scales, scale_stride,
            begin, tl.minimum(begin + segment, size_in), size_in,
            minimums, factors, table, FORMAT, SCALE_ROWS, CODES, ZERO, MINIMUMS, GROUP,
            BLOCK_O, BLOCK_T, BLOCK_K, EVEN, INTERPRETED,
        )  # fmt: skip
        target = out + (part * rows + indices)[:, None] * size_out + outputs[None, :]
        tl.store(target, tl.trans(sums), mask=mask)
    else:
        total = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
        if FORMAT == "scaled" and weight.dtype.element_ty == tl.int8:
            total = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.int32)
        for part in range(segments):
            total += tile_product(
                x, indices, row_mask, x_stride, x_scales, x_scale_stride,
                weight, outputs, output_mask, weight_stride, scales, scale_stride,
                part * segment, tl.minimum((part + 1) * segment, size_in), size_in,
                minimums, factors, table, FORMAT, SCALE_ROWS, CODES, ZERO, MINIMUMS, GROUP,
                BLOCK_O, BLOCK_T, BLOCK_K, EVEN, INTERPRETED,
            )  # fmt: skip
        values = finish(
            tl.trans(total), indices, row_mask, x_scales, outputs, output_mask, scales, bias, FORMAT, HAS_BIAS, ACT
        )
        target = out + indices[:, None] * out_stride + outputs[None, :]
        tl.store(target, values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def add_segments_kernel(
    sums, x_scales, scales, bias, out, rows, size_out, segments, out_stride,
    FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and block of outputs: the sums of all segments, in their order, and what follows."""
    row = tl.program_id(0).to(tl.int64)
    indices = row + tl.arange(0, 1)
    row_mask = indices < rows
    outputs = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    output_mask = outputs < size_out
    total = tl.zeros((BLOCK,), dtype=sums.dtype.element_ty)
    for part in range(segments):
        total += tl.load(sums + (part * rows + row) * size_out + outputs, mask=output_mask, other=0)
    values = finish(
        total[None, :], indices, row_mask, x_scales, outputs, output_mask, scales, bias, FORMAT, HAS_BIAS, ACT
    )
    target = out + indices[:, None] * out_stride + outputs[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=output_mask[None, :])


def matmul(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    kind: str,
    x_scales: Tensor | None = None,
    scales: Tensor | None = None,
    scale_rows: int = 1,
    groups: Groups | None = None,
    bias: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """act(x W^T + b), with the same bits for a row however many there are.

    Args:
        x: (rows, size_in), last stride 1.
        weight: (size_out, size_in), or (size_out, bytes) for the kind "int4"; last stride 1. For the kind "groups" see
            `quire.kernels.triton.groups`.
        out: (rows, size_out), written to; last stride 1.
        kind: a format of `products`.
        x_scales: (rows,) float32, or (rows, ceil(size_in / 128)) for the kind "blocks".
        scales: float32: (size_out,); (size_out, groups) for "int4"; (ceil(size_out / scale_rows), groups) for "blocks".
            For "groups" float16, (groups, size_out).
        scale_rows: outputs that share a scale, for the kind "blocks".
        groups: what the kind "groups" needs beside that.
        bias: (size_out,) of any floating-point dtype.
        act: "silu", "gelu", "gelu_tanh", "quick_gelu" or "relu".

    Returns:
        out.
    """
    (rows, size_in), size_out = x.shape, out.shape[1]
    if not rows or not size_out:
        return out
    block = block_inputs(x, kind)
    segments, segment = segment_inputs(size_out, size_in, block)
    tiles = tile_sizes(rows, x.device, kind, 8 * x.itemsize)
    partial = segments > 1 and rows <= _PARALLEL_ROWS
    target = out
    if partial:
        integers = x.dtype == torch.int8
        target = torch.empty(
            (segments, rows, size_out), dtype=torch.int32 if integers else torch.float32, device=x.device
        )
    none = x  # where the kernel reads nothing
    grid = (-(-size_out // tiles["BLOCK_O"]) * -(-rows // tiles["BLOCK_T"]), segments if partial else 1)
    matmul_kernel[grid](
        x=x, x_scales=none if x_scales is None else x_scales, weight=weight, scales=none if scales is None else scales,
        bias=none if bias is None else bias, out=target, rows=rows, size_out=size_out, size_in=size_in,
        segments=segments, segment=segment,
        x_stride=x.stride(0), x_scale_stride=0 if x_scales is None else x_scales.stride(0),
        weight_stride=weight.stride(0), scale_stride=0 if scales is None else scales.stride(0),
        out_stride=out.stride(0), FORMAT=kind, SCALE_ROWS=scale_rows, PARTIAL=partial, HAS_BIAS=bias is not None,
        ACT=act, **group_arguments(groups, none), BLOCK_K=block, EVEN=size_in % block == 0,
        INTERPRETED=gpu.is_interpreted(), **tiles,
    )  # fmt: skip
    if partial:
        add_segments_kernel[(rows, -(-size_out // _REDUCED))](
            target, none if x_scales is None else x_scales, none if scales is None else scales,
            none if bias is None else bias, out, rows, size_out, segments, out.stride(0),
            FORMAT=kind, HAS_BIAS=bias is not None, ACT=act, BLOCK=_REDUCED,
        )  # fmt: skip
    return out


_BITS = {"i8": 8, "fp8e4nv": 8, "bf16": 16, "fp32": 32}
_DIVISIBLE = ("size_out", "size_in", "segment", "x_stride", "weight_stride", "out_stride")
_ARGUMENTS = dict.fromkeys(
    ("rows", "size_out", "size_in", "segments", "segment", "x_stride", "x_scale_stride", "weight_stride",
     "scale_stride", "out_stride"), "i32"
)  # fmt: skip


def _variant(x: str, weight: str, kind: str, rows: int, *, partial: bool, **groups: Any) -> KernelVariant:
    tiles = tile_sizes(rows, torch.device("cpu"), kind, _BITS[x])
    sums = "*i32" if x == "i8" else "*fp32"
    pointers = {
        "x": f"*{x}", "x_scales": "*fp32", "weight": f"*{weight}", "scales": "*fp16" if groups else "*fp32",
        "minimums": "*fp16", "factors": "*fp32", "table": "*fp32", "bias": "*fp32",
    }  # fmt: skip
    return KernelVariant(
        matmul_kernel,
        {**pointers, "out": sums if partial else "*bf16", **_ARGUMENTS},
        {
            "FORMAT": kind, "SCALE_ROWS": 1, **group_constants(**groups), "PARTIAL": partial, "HAS_BIAS": not partial,
            "ACT": None if partial else "gelu", "BLOCK_O": tiles["BLOCK_O"], "BLOCK_T": tiles["BLOCK_T"],
            "BLOCK_K": 128 if kind in ("int4", "groups") else 1024 // _BITS[x], "EVEN": True, "INTERPRETED": False,
        },
        num_warps=tiles["num_warps"],
        num_stages=tiles["num_stages"],
        divisible=_DIVISIBLE,
    )  # fmt: skip


VARIANTS = [
    _variant("bf16", "bf16", "plain", 1, partial=True),
    _variant("bf16", "bf16", "plain", 1024, partial=False),
    _variant("fp32", "fp32", "plain", 1024, partial=False),
    _variant("bf16", "u8", "int4", 1, partial=True),
    _variant("bf16", "u8", "int4", 1024, partial=False),
    _variant("i8", "i8", "scaled", 1, partial=True),
    _variant("i8", "i8", "scaled", 1024, partial=False),
    _variant("fp8e4nv", "fp8e4nv", "scaled", 1024, partial=False),
    _variant("fp8e4nv", "fp8e4nv", "blocks", 1024, partial=False),
    _variant("bf16", "u8", "groups", 1, partial=True, codes="int4", zero=8, group=128),
    _variant("bf16", "u8", "groups", 1024, partial=False, codes="int4", minimums=True, group=32),
    _variant("bf16", "u8", "groups", 1, partial=True, codes="e2m1", group=16),
    _variant("bf16", "u8", "groups", 1024, partial=False, codes="table", group=64),
    _variant("bf16", "u8", "groups", 1024, partial=False, codes="int8", group=16),
    KernelVariant(
        add_segments_kernel,
        {"sums": "*i32", "x_scales": "*fp32", "scales": "*fp32", "bias": "*fp32", "out": "*bf16", "rows": "i32",
         "size_out": "i32", "segments": "i32", "out_stride": "i32"},
        {"FORMAT": "scaled", "HAS_BIAS": True, "ACT": "silu", "BLOCK": _REDUCED},
    ),
]  # fmt: skip
