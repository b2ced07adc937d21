"""Products of rows with one of several weights each: experts, or adapters. Nothing waits for the device.

A row with an expert is a pair. Pairs are sorted by expert, and each tile has pairs of one expert; how many tiles there
are is only known on the device, so a launch has as many programs as there can be, and some do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import gpu
from quire.kernels.groups import Groups
from quire.kernels.triton.matmul import add_segments_kernel
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

_CHUNK = 128  # pairs that a program sorts
_PARALLEL_PAIRS = 64  # up to which a launch computes the segments of a sum at once
_REDUCED = 256  # outputs of a program that adds segments


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(choices, counts, pairs, experts, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """One program per chunk: how many pairs each expert has in it."""
    indices = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(choices + indices, mask=indices < pairs, other=-1).to(tl.int32)
    columns = tl.arange(0, EXPERTS)
    count = tl.sum((chosen[:, None] == columns[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * experts + columns, count, mask=columns < experts)


@triton.jit(do_not_specialize=["pairs", "chunks"])
def sort_kernel(
    choices, counts, order, totals, pairs, chunks, experts, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
    TABLE: tl.constexpr,
):  # fmt: skip
    """One program per chunk: the places of its pairs among all, which stay in order for each expert."""
    chunk = tl.program_id(0)
    columns = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    before = tl.zeros((EXPERTS,), dtype=tl.int32)
    for start in range(0, chunks, TABLE):
        rows = start + tl.arange(0, TABLE)
        inside = (rows < chunks)[:, None] & (columns < experts)[None, :]
        count = tl.load(counts + rows[:, None] * experts + columns[None, :], mask=inside, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((rows < chunk)[:, None], count, 0), 0)
    first = tl.cumsum(total, 0) - total + before
    inner = tl.arange(0, CHUNK)
    indices = chunk * CHUNK + inner
    chosen = tl.load(choices + indices, mask=indices < pairs, other=-1).to(tl.int32)
    place = tl.sum(tl.where(chosen[:, None] == columns[None, :], first[None, :], 0), 1)
    earlier = (chosen[:, None] == chosen[None, :]) & (inner[:, None] > inner[None, :])
    place += tl.sum(earlier.to(tl.int32), 1)
    tl.store(order + place, indices, mask=chosen >= 0)
    if chunk == 0:
        tl.store(totals + columns, total, mask=columns < experts)


def sort_pairs(choices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort pairs by expert.

    Args:
        choices: (pairs,) integers: the expert of each; -1: none, the pair is left out.
        experts: how many there are.

    Returns:
        order (pairs,) int32: indices of pairs, of which only those with an expert are written; and totals (experts,)
        int32: pairs of each expert.
    """
    pairs, device = len(choices), choices.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    totals = torch.empty(experts, dtype=torch.int32, device=device)
    chunks = -(-pairs // _CHUNK)
    if not chunks:
        return order, totals.zero_()
    counts = torch.empty((chunks, experts), dtype=torch.int32, device=device)
    block = triton.next_power_of_2(experts)
    count_kernel[(chunks,)](choices, counts, pairs, experts, CHUNK=_CHUNK, EXPERTS=block, num_warps=8)
    sort_kernel[(chunks,)](
        choices, counts, order, totals, pairs, chunks, experts, CHUNK=_CHUNK, EXPERTS=block, TABLE=16, num_warps=8
    )
    return order, totals


@triton.jit(do_not_specialize=["pairs"])
def grouped_matmul_kernel(
    x, x_scales, weight, scales, minimums, factors, table, bias, row_weights, order, totals, out,
    pairs, experts, size_out, size_in, segments, segment, x_stride, x_scale_stride, expert_stride, weight_stride,
    expert_scale_stride, scale_stride, out_stride,
    FORMAT: tl.constexpr, SCALE_ROWS: tl.constexpr,
    CODES: tl.constexpr, ZERO: tl.constexpr, MINIMUMS: tl.constexpr, GROUP: tl.constexpr,
    PARTIAL: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, ADD: tl.constexpr, HAS_BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program per tile of pairs and outputs. Pairs read the row of x of their index / GATHER, or of their place.

    They are written at their index (SCATTER), or at their place. PARTIAL: as `matmul_kernel`.
    """
    tiles_o = tl.cdiv(size_out, BLOCK_O)
    tile_t, tile_o = tl.program_id(0) // tiles_o, tl.program_id(0) % tiles_o
    every = tl.arange(0, EXPERTS)
    total = tl.load(totals + every, mask=every < experts, other=0)
    tiles = (total + BLOCK_T - 1) // BLOCK_T
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile_t).to(tl.int32), 0)
    if expert >= experts:
        return
    first = tl.sum(tl.where(every < expert, total, 0), 0)
    last = first + tl.sum(tl.where(every == expert, total, 0), 0)
    tile_t -= tl.sum(tl.where(every < expert, tiles, 0), 0)
    places = (first + tile_t * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    row_mask = places < last
    indices = tl.load(order + places, mask=row_mask, other=0).to(tl.int64)
    rows = indices // GATHER if GATHER else places
    outputs = (tile_o * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    output_mask = outputs < size_out
    mask = row_mask[:, None] & output_mask[None, :]
    weight += expert.to(tl.int64) * expert_stride
    scales += expert.to(tl.int64) * expert_scale_stride
    if FORMAT == "groups":
        minimums += expert.to(tl.int64) * expert_scale_stride
        factors += expert.to(tl.int64) * size_out
    if PARTIAL:
        begin = tl.program_id(1) * segment
        sums = tile_product(
            x, rows, row_mask, x_stride, x_scales, x_scale_stride,
            weight, outputs, output_mask, weight_stride, scales, scale_stride,
            begin, tl.minimum(begin + segment, size_in), size_in,
            minimums, factors, table, FORMAT, SCALE_ROWS, CODES, ZERO, MINIMUMS, GROUP,
            BLOCK_O, BLOCK_T, BLOCK_K, EVEN, INTERPRETED,
        )  # fmt: skip
        target = out + (tl.program_id(1).to(tl.int64) * pairs + places)[:, None] * size_out + outputs[None, :]
        tl.store(target, tl.trans(sums), mask=mask)
    else:
        acc = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
        if FORMAT == "scaled" and weight.dtype.element_ty == tl.int8:
            acc = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.int32)
        for part in range(segments):
            acc += tile_product(
                x, rows, row_mask, x_stride, x_scales, x_scale_stride,
                weight, outputs, output_mask, weight_stride, scales, scale_stride,
                part * segment, tl.minimum((part + 1) * segment, size_in), size_in,
                minimums, factors, table, FORMAT, SCALE_ROWS, CODES, ZERO, MINIMUMS, GROUP,
                BLOCK_O, BLOCK_T, BLOCK_K, EVEN, INTERPRETED,
            )  # fmt: skip
        values = finish(
            tl.trans(acc), rows, row_mask, x_scales, outputs, output_mask, scales,
            bias + expert.to(tl.int64) * size_out, FORMAT, HAS_BIAS, None,
        )  # fmt: skip
        if WEIGHTED:
            values *= tl.load(row_weights + indices, mask=row_mask, other=0.0)[:, None]
        target = out + (indices if SCATTER else places)[:, None] * out_stride + outputs[None, :]
        if ADD:
            values += tl.load(target, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, values.to(out.dtype.element_ty), mask=mask)


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    order: Tensor,
    totals: Tensor,
    *,
    kind: str,
    x_scales: Tensor | None = None,
    scales: Tensor | None = None,
    scale_rows: int = 1,
    groups: Groups | None = None,
    bias: Tensor | None = None,
    row_weights: Tensor | None = None,
    gather: int = 0,
    scatter: bool = False,
    add: bool = False,
    split: bool = False,
) -> Tensor:
    """(x W_e^T + b_e) * w for pairs with their expert e; the same bits for a row however many there are.

    Args:
        x: (rows, size_in), last stride 1.
        weight: (experts, size_out, size_in), or as `matmul` has it; last stride 1.
        out: (pairs, size_out), written to where there are pairs; last stride 1.
        order, totals: see `sort_pairs`.
        kind: a format of `products`.
        x_scales, scales, scale_rows, groups: see `matmul`; scales have the experts as a first dimension, and so have
            minimums and factors of groups.
        bias: (experts, size_out), contiguous.
        row_weights: (pairs,) float32 factors of the results.
        gather: pairs that read the same row: row of a pair = its index // gather; 0: its place in the order.
        scatter: a pair's result is at its index, otherwise at its place in the order.
        add: results are added to what `out` holds.
        split: sums are cut into segments, for weights with few outputs; not with a bias, factors or `scatter`.

    Returns:
        out.
    """
    pairs, experts, size_out, size_in = len(order), len(weight), out.shape[1], x.shape[1]
    if not pairs or not size_out:
        return out
    block = block_inputs(x, kind)
    segments, segment = segment_inputs(size_out, size_in, block) if split else (1, size_in)
    tiles = tile_sizes(pairs // experts, x.device, kind, 8 * x.itemsize)
    partial = segments > 1 and pairs <= _PARALLEL_PAIRS
    target = torch.empty((segments, pairs, size_out), dtype=torch.float32, device=x.device) if partial else out
    none = x  # where the kernel reads nothing
    most_tiles = pairs // tiles["BLOCK_T"] + min(experts, pairs)
    grouped_matmul_kernel[(most_tiles * -(-size_out // tiles["BLOCK_O"]), segments if partial else 1)](
        x=x, x_scales=none if x_scales is None else x_scales, weight=weight, scales=none if scales is None else scales,
        bias=none if bias is None else bias, row_weights=none if row_weights is None else row_weights,
        order=order, totals=totals, out=target, pairs=pairs, experts=experts, size_out=size_out, size_in=size_in,
        segments=segments, segment=segment,
        x_stride=x.stride(0), x_scale_stride=0 if x_scales is None else x_scales.stride(0),
        expert_stride=weight.stride(0), weight_stride=weight.stride(1),
        expert_scale_stride=0 if scales is None else scales.stride(0),
        scale_stride=0 if scales is None else scales.stride(1), out_stride=out.stride(0),
        FORMAT=kind, SCALE_ROWS=scale_rows, **group_arguments(groups, none),
        PARTIAL=partial, GATHER=gather, SCATTER=scatter, ADD=add, HAS_BIAS=bias is not None,
        WEIGHTED=row_weights is not None, EXPERTS=triton.next_power_of_2(experts),
        BLOCK_K=block, EVEN=size_in % block == 0, INTERPRETED=gpu.is_interpreted(), **tiles,
    )  # fmt: skip
    return _sum_segments(target, out, kind) if partial else out


def _sum_segments(parts: Tensor, out: Tensor, kind: str) -> Tensor:
    """Write the sums of parts (segments, pairs, size_out) to `out`."""
    segments, pairs, size_out = parts.shape
    none = parts  # where the kernel reads nothing
    add_segments_kernel[(pairs, -(-size_out // _REDUCED))](
        parts, none, none, none, out, pairs, size_out, segments, out.stride(0),
        FORMAT=kind, HAS_BIAS=False, ACT=None, BLOCK=_REDUCED,
    )  # fmt: skip
    return out


_COUNTS = dict.fromkeys(("pairs", "chunks", "experts"), "i32")
_NUMBERS = dict.fromkeys(
    ("pairs", "experts", "size_out", "size_in", "segments", "segment", "x_stride", "x_scale_stride", "expert_stride",
     "weight_stride", "expert_scale_stride", "scale_stride", "out_stride"), "i32"
)  # fmt: skip


_BITS = {"i8": 8, "fp8e4nv": 8, "bf16": 16}


def _variant(x: str, weight: str, kind: str, rows: int, *, gather: int, **groups: Any) -> KernelVariant:
    tiles = tile_sizes(rows, torch.device("cpu"), kind, _BITS[x])
    pointers = {
        "x": f"*{x}", "x_scales": "*fp32", "weight": f"*{weight}", "scales": "*fp16" if groups else "*fp32",
        "minimums": "*fp16", "factors": "*fp32", "table": "*fp32", "bias": "*fp32",
        "row_weights": "*fp32", "order": "*i32", "totals": "*i32", "out": "*bf16",
    }  # fmt: skip
    return KernelVariant(
        grouped_matmul_kernel,
        {**pointers, **_NUMBERS},
        {
            "FORMAT": kind, "SCALE_ROWS": 1, **group_constants(**groups),
            "PARTIAL": False, "GATHER": gather, "SCATTER": not gather, "ADD": False,
            "HAS_BIAS": False, "WEIGHTED": not gather, "EXPERTS": 128, "BLOCK_O": tiles["BLOCK_O"],
            "BLOCK_T": tiles["BLOCK_T"], "BLOCK_K": 64 if kind == "plain" else 128, "EVEN": True, "INTERPRETED": False,
        },
        num_warps=tiles["num_warps"],
        num_stages=tiles["num_stages"],
        divisible=("size_out", "size_in", "segment", "x_stride", "expert_stride", "weight_stride", "out_stride"),
    )  # fmt: skip


VARIANTS = [
    KernelVariant(
        count_kernel, {"choices": "*i32", "counts": "*i32", "pairs": "i32", "experts": "i32"},
        {"CHUNK": _CHUNK, "EXPERTS": 256}, num_warps=8,
    ),
    KernelVariant(
        sort_kernel,
        {"choices": "*i32", "counts": "*i32", "order": "*i32", "totals": "*i32", **_COUNTS},
        {"CHUNK": _CHUNK, "EXPERTS": 256, "TABLE": 16}, num_warps=8,
    ),
    _variant("bf16", "bf16", "plain", 1, gather=8),
    _variant("bf16", "bf16", "plain", 1024, gather=0),
    _variant("i8", "i8", "scaled", 1024, gather=8),
    _variant("fp8e4nv", "fp8e4nv", "blocks", 64, gather=8),
    _variant("bf16", "u8", "int4", 1, gather=0),
    _variant("bf16", "u8", "groups", 1, gather=8, codes="e2m1", group=32),
    _variant("bf16", "u8", "groups", 1024, gather=0, codes="int4", minimums=True, group=128),
]  # fmt: skip
