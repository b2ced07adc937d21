"""Log-probabilities of chosen and of top tokens; the twin of `quire.kernels.token_logprobs.reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.variants import KernelVariant
from quire.kernels.triton.vocab import CHUNK, load_logits, of_key, ordered_key

LOW = tl.constexpr(32)  # bits of a sort key that hold the token
_FEWEST = 32  # top tokens of a block; one compiled kernel serves all smaller numbers


@triton.jit
def chunk_sum_kernel(logits, largest, sums, stride, vocab, chunks, CHUNK: tl.constexpr):
    """The largest logit of a chunk, and the sum of e^(logit - largest)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = load_logits(logits + row * stride, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
    best = tl.max(x, 0)
    weights = tl.exp(tl.where(x == best, 0.0, x - best))
    tl.store(largest + row * chunks + chunk, best)
    tl.store(sums + row * chunks + chunk, tl.sum(tl.where(x > -float("inf"), weights, 0.0).to(tl.float64), 0))


@triton.jit
def row_total(largest, sums, row, chunks, CHUNKS: tl.constexpr):
    """The largest logit of a row, and the logarithm of the sum of e^(logit - largest)."""
    lanes = tl.arange(0, CHUNKS)
    tops = tl.load(largest + row * chunks + lanes, mask=lanes < chunks, other=-float("inf"))
    parts = tl.load(sums + row * chunks + lanes, mask=lanes < chunks, other=0.0)
    best = tl.max(tops, 0)
    factors = tl.exp(tl.where(tops == best, 0.0, tops - best)).to(tl.float64)
    return best, tl.log(tl.sum(tl.where(parts > 0, parts * factors, 0.0), 0).to(tl.float32))


@triton.jit
def rank_kernel(
    logits,
    largest,
    sums,
    tokens,
    chosen_logprobs,
    larger,
    keys,
    stride,
    vocab,
    chunks,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The log-probability of a row's token, how many of a chunk's tokens exceed it, and sort keys of the chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, log_total = row_total(largest, sums, row, chunks, CHUNKS)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits + row * stride, ids, vocab)
    chosen = tl.load(logits + row * stride + tl.maximum(tl.load(tokens + row), 0)) - best - log_total
    tl.store(larger + row * chunks + chunk, tl.sum(((x - best - log_total) > chosen).to(tl.int32), 0).to(tl.int32))
    if chunk == 0:
        tl.store(chosen_logprobs + row, chosen)
    if KEYS:
        low = (vocab - 1 - ids).to(tl.int64)  # equal logits are in order of ids
        tl.store(keys + row * vocab + ids, (ordered_key(x).to(tl.int64) << LOW) | low, mask=ids < vocab)


@triton.jit(do_not_specialize=["count"])
def top_kernel(keys, largest, sums, ids, logprobs, vocab, chunks, count, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens and log-probabilities from sort keys (rows, count); one program for a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    best, log_total = row_total(largest, sums, row, chunks, CHUNKS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + row * count + at, mask=at < count, other=0)
    tl.store(ids + row * count + at, vocab - 1 - (key & 0xFFFFFFFF), mask=at < count)
    tl.store(logprobs + row * count + at, of_key((key >> LOW).to(tl.int32)) - best - log_total, mask=at < count)


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities; see `quire.kernels.token_logprobs.token_logprobs`.

    Args:
        logits: (rows, vocab) float32, last stride 1.
        tokens: (rows,) int64.
    """
    (rows, vocab), device = logits.shape, logits.device
    chunks = triton.cdiv(vocab, CHUNK)
    width, sizes = triton.next_power_of_2(chunks), (vocab, chunks)
    largest = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    sums = torch.empty((rows, chunks), dtype=torch.float64, device=device)
    chosen_logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    larger = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    keys = torch.empty((rows, vocab if top else 0), dtype=torch.int64, device=device)
    ids = torch.empty((rows, top), dtype=torch.int64, device=device)
    logprobs = torch.empty((rows, top), dtype=torch.float32, device=device)
    if not rows:
        return chosen_logprobs, larger.sum(-1), ids, logprobs
    chunk_sum_kernel[(rows, chunks)](logits, largest, sums, logits.stride(0), *sizes, CHUNK=CHUNK)
    rank_kernel[(rows, chunks)](
        logits,
        largest,
        sums,
        tokens,
        chosen_logprobs,
        larger,
        keys,
        logits.stride(0),
        *sizes,
        KEYS=top > 0,
        CHUNK=CHUNK,
        CHUNKS=width,
        num_warps=8,
    )
    if top:
        highest = keys.topk(top, -1).values
        block = min(1024, triton.next_power_of_2(max(top, _FEWEST)))
        top_kernel[(rows, triton.cdiv(top, block))](
            highest, largest, sums, ids, logprobs, *sizes, top, CHUNKS=width, BLOCK=block, num_warps=1
        )
    return chosen_logprobs, larger.sum(-1).add_(1), ids, logprobs


_SIZES = {"vocab": "i32", "chunks": "i32"}
_ROWS = {"largest": "*fp32", "sums": "*fp64"}
VARIANTS = [
    KernelVariant(chunk_sum_kernel, {"logits": "*fp32", **_ROWS, "stride": "i32", **_SIZES}, {"CHUNK": CHUNK}),
    KernelVariant(
        rank_kernel,
        {
            "logits": "*fp32",
            **_ROWS,
            "tokens": "*i64",
            "chosen_logprobs": "*fp32",
            "larger": "*i32",
            "keys": "*i64",
            "stride": "i32",
            **_SIZES,
        },
        {"KEYS": True, "CHUNK": CHUNK, "CHUNKS": 64},
        num_warps=8,
    ),
    KernelVariant(
        top_kernel,
        {"keys": "*i64", **_ROWS, "ids": "*i64", "logprobs": "*fp32", **_SIZES, "count": "i32"},
        {"CHUNKS": 64, "BLOCK": 32},
        num_warps=1,
    ),
    KernelVariant(  # Triton makes integers that are 1 constants
        top_kernel,
        {"keys": "*i64", **_ROWS, "ids": "*i64", "logprobs": "*fp32", "vocab": "i32", "count": "i32"},
        {"chunks": 1, "CHUNKS": 1, "BLOCK": 32},
        num_warps=1,
    ),
]
