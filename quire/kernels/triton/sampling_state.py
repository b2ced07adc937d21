"""State of sampling by row of a table; the twins of the ops of `quire.kernels.sampling_state`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.variants import KernelVariant

_BLOCK = 128  # rows of a program
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
FIRST, SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
UNIT = tl.constexpr(1.0 / (1 << 53))


@triton.jit(do_not_specialize=["count"])
def randoms_kernel(states, rows, positions, out, count, BLOCK: tl.constexpr):
    """The output function of SplitMix64 (Steele et al. 2014) of state ^ position."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=0)
    state = tl.load(states + row, mask=inside, other=0) ^ tl.load(positions + at, mask=inside, other=0)
    mixed = state.to(tl.uint64, bitcast=True) + GAMMA
    mixed = (mixed ^ (mixed >> 30)) * FIRST
    mixed = (mixed ^ (mixed >> 27)) * SECOND
    mixed = (mixed ^ (mixed >> 31)) >> 11
    tl.store(out + at, mixed.to(tl.int64).to(tl.float64) * UNIT, mask=inside)


@triton.jit
def record_kernel(
    tokens, inputs, starts, drafted, rows, positions, slots, counts, taken, last_tokens, vocab, COUNTS: tl.constexpr
):
    """One program for a sequence: walk its draft, count its tokens."""
    span = tl.program_id(0)
    row, start, length = tl.load(rows + span), tl.load(starts + span), tl.load(drafted + span)
    slot = tl.full((), -1, tl.int64)
    if COUNTS:
        slot = tl.load(slots + row).to(tl.int64)
    accepted = tl.full((), 1, tl.int32)
    going = length >= 0
    for depth in range(length + 1):
        sampled = tl.load(tokens + start + depth)
        token = tl.maximum(sampled, 0)  # any token, if there is none
        if going:
            if slot >= 0:
                tl.atomic_add(counts + slot * vocab + token, 1)
            tl.store(last_tokens + row, token)
            accepted = (accepted * 0 + depth + 1).to(tl.int32)
            going = (depth < length) & (sampled == tl.load(inputs + start + depth + 1, mask=depth < length, other=0))
    tl.store(taken + span, accepted)
    tl.store(positions + row, tl.load(positions + row) + accepted)


def randoms_at(states: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Random numbers of positions; see `quire.kernels.sampling_state.randoms_at`.

    Args:
        states: (table rows,) int64.
        rows: (n,) int64, like positions.

    Returns:
        (n,) float64
    """
    out = torch.empty(len(rows), dtype=torch.float64, device=rows.device)
    if len(rows):
        randoms_kernel[(triton.cdiv(len(rows), _BLOCK),)](states, rows, positions, out, len(rows), BLOCK=_BLOCK)
    return out


def record_tokens(
    tokens: Tensor,
    inputs: Tensor,
    starts: Tensor,
    drafted: Tensor,
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    slots: Tensor | None,
    counts: Tensor | None,
) -> Tensor:
    """Verify drafts and count tokens; see `quire.kernels.sampling_state.record_tokens`.

    Args:
        tokens: (n,) int64, like inputs.
        starts: (sequences,) int32, like drafted.
        rows: (sequences,) int64.
        positions: (table rows,) int64, like last_tokens.
        slots: (table rows,) int32.
        counts: (slots, vocab) int32, contiguous.

    Returns:
        (sequences,) int32
    """
    taken = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
    if len(rows):
        record_kernel[(len(rows),)](
            tokens,
            inputs,
            starts,
            drafted,
            rows,
            positions,
            taken if slots is None else slots,
            taken if counts is None else counts,
            taken,
            last_tokens,
            0 if counts is None else counts.shape[1],
            COUNTS=counts is not None,
            num_warps=1,
        )
    return taken


VARIANTS = [
    KernelVariant(
        randoms_kernel,
        {"states": "*i64", "rows": "*i64", "positions": "*i64", "out": "*fp64", "count": "i32"},
        {"BLOCK": _BLOCK},
    ),
    KernelVariant(
        record_kernel,
        {
            **dict.fromkeys(("tokens", "inputs", "rows", "positions", "last_tokens"), "*i64"),
            **dict.fromkeys(("starts", "drafted", "slots", "counts", "taken"), "*i32"),
            "vocab": "i32",
        },
        {"COUNTS": True},
        num_warps=1,
    ),
    KernelVariant(  # Triton makes integers that are 1 constants
        randoms_kernel,
        {"states": "*i64", "rows": "*i64", "positions": "*i64", "out": "*fp64"},
        {"count": 1, "BLOCK": _BLOCK},
    ),
    KernelVariant(
        record_kernel,
        {
            **dict.fromkeys(("tokens", "inputs", "rows", "positions", "last_tokens"), "*i64"),
            **dict.fromkeys(("starts", "drafted", "slots", "counts", "taken"), "*i32"),
            "vocab": "i32",
        },
        {"COUNTS": False},
        num_warps=1,
    ),
]
