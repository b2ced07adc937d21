"""What the kernels over logits share: loads, weights of tokens, and the order of tokens.

A row of logits is cut into chunks of a fixed size, so that sums over a row have the same order in any batch. The weight
e^(logit - largest logit) of a token is an integer, in units of 2^-44: sums of integers are exact, and the same in any
order. A float32 weight has 24 bits, so that only weights below 2^-20 are rounded, and those below 2^-44 are 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 4096  # tokens that one program reads
# Arguments with a number per row: rows of a matrix, whose alignment depends on the batch. It does not choose a variant.
ROW_SETTINGS = ("temperatures", "randoms", "log_min_p", "top_k", "top_p")
UNIT = tl.constexpr(float(1 << 44))  # weights of the most likely token


@triton.jit
def load_logits(logits, ids, vocab):
    """Float32 logits of some token ids; -inf past the vocabulary and for NaN."""
    x = tl.load(logits + ids, mask=ids < vocab, other=-float("inf"))
    return tl.where(x == x, x, -float("inf"))


@triton.jit
def to_integer(weights):
    """Float32 weights from 0 to 1 as int64, in units of 2^-44."""
    return (weights * UNIT).to(tl.int64)


@triton.jit
def ordered_key(x):
    """An int32 for each float32 that is not NaN, in the same order; equal for 0.0 and -0.0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def of_key(key):
    """The float32 of an `ordered_key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def largest_of_row(largest, row, chunks, CHUNKS: tl.constexpr):
    """The largest logit of a row from those of its chunks (rows, chunks)."""
    lanes = tl.arange(0, CHUNKS)
    return tl.max(tl.load(largest + row * chunks + lanes, mask=lanes < chunks, other=-float("inf")), 0)
