"""Biases and penalties of logits; the twins of the ops of `quire.kernels.adjust_logits`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.variants import KernelVariant
from quire.kernels.triton.vocab import CHUNK

_BLOCK = 128  # biases that are added at a time
IN_PROMPT = tl.constexpr(1 << 30)


@triton.jit
def add_biases_kernel(logits, rows, positions, tokens, values, limits, counts, stride, width, BLOCK: tl.constexpr):
    """One program for a row of logits. A token may have several biases, of which one is finite."""
    index = tl.program_id(0).to(tl.int64)
    row, position = tl.load(rows + index), tl.load(positions + index)
    count = tl.load(counts + row)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        place = row * width + at
        applies = (at < count) & (position < tl.load(limits + place, mask=at < count, other=0))
        token = tl.load(tokens + place, mask=applies, other=0)
        value = tl.load(values + place, mask=applies, other=0.0)
        tl.atomic_add(logits + index * stride + token, value, mask=applies)


@triton.jit
def penalize_kernel(
    logits,
    rows,
    depths,
    inputs,
    slots,
    counts,
    repetition,
    frequency,
    presence,
    stride,
    vocab,
    CHUNK: tl.constexpr,
):
    """One program for a chunk of a row of logits."""
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + index)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = ids < vocab
        x = tl.load(logits + index * stride + ids, mask=inside, other=0.0)
        seen = tl.load(counts + slot * vocab + ids, mask=inside, other=0)
        generated = seen & (IN_PROMPT - 1)
        for before in range(tl.load(depths + index)):  # tokens of a draft in front of this row
            generated += (ids == tl.load(inputs + index - before)).to(tl.int32)
        penalty = tl.load(repetition + row)
        x = tl.where((seen >= IN_PROMPT) | (generated > 0), tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
        x -= generated.to(tl.float32) * tl.load(frequency + row)
        x -= tl.where(generated > 0, tl.load(presence + row), 0.0)
        tl.store(logits + index * stride + ids, x, mask=inside)


def add_biases(
    logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor, values: Tensor, limits: Tensor, counts: Tensor
) -> None:
    """Add biases to logits in place; see `quire.kernels.adjust_logits.add_biases`.

    Args:
        logits: (n, vocab) float32, last stride 1.
        rows: (n,) int64, like positions.
        tokens: (table rows, width) int32, like limits, contiguous.
        values: (table rows, width) float32, contiguous.
        counts: (table rows,) int32.
    """
    if len(logits):
        add_biases_kernel[(len(logits),)](
            logits,
            rows,
            positions,
            tokens,
            values,
            limits,
            counts,
            logits.stride(0),
            tokens.shape[1],
            BLOCK=_BLOCK,
        )


def penalize(
    logits: Tensor,
    rows: Tensor,
    depths: Tensor,
    inputs: Tensor,
    slots: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Apply penalties to logits in place; see `quire.kernels.adjust_logits.penalize`.

    Args:
        logits: (n, vocab) float32, last stride 1.
        rows: (n,) int64.
        depths: (n,) int32.
        inputs: (n,) int64.
        slots: (table rows,) int32.
        counts: (slots, vocab) int32, contiguous.
        repetition: (table rows,) float32, like frequency and presence.
    """
    if len(logits):
        vocab = logits.shape[1]
        penalize_kernel[(len(logits), triton.cdiv(vocab, CHUNK))](
            logits,
            rows,
            depths,
            inputs,
            slots,
            counts,
            repetition,
            frequency,
            presence,
            logits.stride(0),
            vocab,
            CHUNK=CHUNK,
            num_warps=8,
        )


VARIANTS = [
    KernelVariant(
        add_biases_kernel,
        {
            "logits": "*fp32",
            "rows": "*i64",
            "positions": "*i64",
            "tokens": "*i32",
            "values": "*fp32",
            "limits": "*i32",
            "counts": "*i32",
            "stride": "i32",
            "width": "i32",
        },
        {"BLOCK": _BLOCK},
    ),
    KernelVariant(
        penalize_kernel,
        {
            "logits": "*fp32",
            "rows": "*i64",
            "depths": "*i32",
            "inputs": "*i64",
            "slots": "*i32",
            "counts": "*i32",
            **dict.fromkeys(("repetition", "frequency", "presence"), "*fp32"),
            "stride": "i32",
            "vocab": "i32",
        },
        {"CHUNK": CHUNK},
        num_warps=8,
    ),
]
