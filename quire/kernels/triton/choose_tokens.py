"""Tokens by the largest logit, or at random by inverse CDF; the twin of `quire.kernels.choose_tokens.reference`.

Rows with top-k or top-p are left to `ranked_tokens`. A row is read twice, by one program for each chunk, and its chosen
chunk a third time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.sampling import NO_TOKEN
from quire.kernels.triton.ranked_tokens import choose_ranked
from quire.kernels.triton.variants import KernelVariant
from quire.kernels.triton.vocab import CHUNK, ROW_SETTINGS, largest_of_row, load_logits, to_integer

NONE = tl.constexpr(NO_TOKEN)


@triton.jit
def chunk_max_kernel(logits, largest, first, stride, vocab, chunks, CHUNK: tl.constexpr):
    """The largest logit of a chunk, and the first token that has it; no token if one of them is NaN or infinite."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-float("inf"))
    invalid = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0) > 0
    x = tl.where(x == x, x, -float("inf"))
    best = tl.max(x, 0)
    tl.store(largest + row * chunks + chunk, best)
    tl.store(first + row * chunks + chunk, tl.where(invalid, NONE, tl.min(tl.where(x == best, ids, vocab), 0)))


@triton.jit
def token_weights(x, best, temperature, log_min_p):
    """Integer weights of e^(x / temperature); 0 for tokens that min-p excludes.

    As on the CPU, min-p rounds the quotients before it compares them.
    """
    scaled, top = tl.div_rn(x, temperature), tl.div_rn(best, temperature)
    distance = tl.where(log_min_p > -float("inf"), scaled - top, tl.div_rn(x - best, temperature))
    weights = tl.exp(tl.where(x == best, 0.0, distance))
    excluded = (x == -float("inf")) | (scaled < top + log_min_p)
    return to_integer(tl.where(excluded, 0.0, weights))


@triton.jit
def is_random(temperatures, top_k, top_p, row):
    """Whether the token of a row is random, among all tokens."""
    return (tl.load(temperatures + row) > 0) & (tl.load(top_k + row) == 0) & (tl.load(top_p + row) >= 1)


@triton.jit(do_not_specialize_on_alignment=ROW_SETTINGS)
def chunk_mass_kernel(
    logits,
    largest,
    masses,
    temperatures,
    log_min_p,
    top_k,
    top_p,
    stride,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The sum of the weights of a chunk's tokens."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_random(temperatures, top_k, top_p, row):
        best = largest_of_row(largest, row, chunks, CHUNKS)
        x = load_logits(logits + row * stride, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
        weights = token_weights(x, best, tl.load(temperatures + row), tl.load(log_min_p + row))
        tl.store(masses + row * chunks + chunk, tl.sum(weights, 0))


@triton.jit(do_not_specialize_on_alignment=ROW_SETTINGS)
def choose_kernel(
    logits,
    largest,
    first,
    masses,
    temperatures,
    randoms,
    log_min_p,
    top_k,
    top_p,
    out,
    stride,
    vocab,
    chunks,
    RANDOM: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The first token with the largest logit; with RANDOM, that of a random row is where the running sum of weights
    exceeds random * total."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, CHUNKS)
    tops = tl.load(largest + row * chunks + lanes, mask=lanes < chunks, other=-float("inf"))
    best = tl.max(tops, 0)
    token = tl.load(first + row * chunks + tl.min(tl.where(tops == best, lanes, CHUNKS), 0))
    firsts = tl.load(first + row * chunks + lanes, mask=lanes < chunks, other=0)
    is_valid = tl.min(firsts, 0) >= 0
    if RANDOM and is_random(temperatures, top_k, top_p, row):
        mass = tl.load(masses + row * chunks + lanes, mask=lanes < chunks, other=0)
        total = tl.sum(mass, 0)
        target = (tl.load(randoms + row) * total.to(tl.float64)).to(tl.int64) + 1
        target = tl.minimum(target, total)
        chunk = tl.sum(((tl.cumsum(mass, 0) < target) & (lanes < chunks)).to(tl.int32), 0)
        chunk = tl.minimum(chunk, chunks - 1)
        before = tl.sum(tl.where(lanes < chunk, mass, 0), 0)
        x = load_logits(logits + row * stride, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
        weights = token_weights(x, best, tl.load(temperatures + row), tl.load(log_min_p + row))
        passed = (before + tl.cumsum(weights, 0) < target).to(tl.int32)
        token = tl.minimum(chunk * CHUNK + tl.sum(passed, 0), vocab - 1)
    tl.store(out + row, tl.where(is_valid, token, NONE).to(tl.int64))


def argmax(logits: Tensor) -> Tensor:
    """(rows,) int64: the first token with the largest logit in each row of logits (rows, vocab) float32."""
    return _choose(logits, None, random=False)[0]


def choose_tokens(
    logits: Tensor,
    temperatures: Tensor,
    randoms: Tensor,
    log_min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    random: bool,
    ranked: bool,
) -> Tensor:
    """A token for each row; see `quire.kernels.choose_tokens`.

    Args:
        logits: (rows, vocab) float32, last stride 1.
        temperatures: (rows,) float32, like log_min_p and top_p.
        randoms: (rows,) float64.
        top_k: (rows,) int32.
        random: whether a row is random without top-k and top-p.
        ranked: whether a row has top-k or top-p.

    Returns:
        (rows,) int64
    """
    settings = temperatures, randoms, log_min_p, top_k, top_p
    out, largest = _choose(logits, settings, random=random)
    if ranked and len(logits):
        choose_ranked(logits, largest, *settings, out)
    return out


def _choose(
    logits: Tensor, settings: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None, *, random: bool
) -> tuple[Tensor, Tensor]:
    """Tokens without regard to top-k and top-p, and the largest logits (rows, chunks) of chunks."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    largest = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    first = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out, largest
    stride, width = logits.stride(0), triton.next_power_of_2(chunks)
    chunk_max_kernel[(rows, chunks)](logits, largest, first, stride, vocab, chunks, CHUNK=CHUNK)
    temperatures, randoms, log_min_p, top_k, top_p = (out,) * 5 if settings is None else settings
    masses = torch.empty((rows, chunks), dtype=torch.int64, device=logits.device) if random else out
    of_row = temperatures, log_min_p, top_k, top_p
    if random:
        chunk_mass_kernel[(rows, chunks)](
            logits, largest, masses, *of_row, stride, vocab, chunks, CHUNK=CHUNK, CHUNKS=width, num_warps=8
        )
    choose_kernel[(rows,)](
        logits,
        largest,
        first,
        masses,
        temperatures,
        randoms,
        log_min_p,
        top_k,
        top_p,
        out,
        stride,
        vocab,
        chunks,
        RANDOM=random,
        CHUNK=CHUNK,
        CHUNKS=width,
        num_warps=8 if random else 1,
    )
    return out, largest


_SIZES = dict.fromkeys(("stride", "vocab", "chunks"), "i32")
_SETTINGS = {"temperatures": "*fp32", "log_min_p": "*fp32", "top_k": "*i32", "top_p": "*fp32"}
VARIANTS = [
    KernelVariant(
        chunk_max_kernel, {"logits": "*fp32", "largest": "*fp32", "first": "*i32", **_SIZES}, {"CHUNK": CHUNK}
    ),
    KernelVariant(
        chunk_mass_kernel,
        {"logits": "*fp32", "largest": "*fp32", "masses": "*i64", **_SETTINGS, **_SIZES},
        {"CHUNK": CHUNK, "CHUNKS": 64},
        num_warps=8,
    ),
    KernelVariant(
        choose_kernel,
        {
            "logits": "*fp32",
            "largest": "*fp32",
            "first": "*i32",
            "masses": "*i64",
            "randoms": "*fp64",
            "out": "*i64",
            **_SETTINGS,
            **_SIZES,
        },
        {"RANDOM": True, "CHUNK": CHUNK, "CHUNKS": 64},
        num_warps=8,
    ),
    KernelVariant(  # Triton makes integers that are 1 constants
        choose_kernel,
        {
            "logits": "*fp32",
            "largest": "*fp32",
            "first": "*i32",
            "masses": "*i64",
            "randoms": "*fp64",
            "out": "*i64",
            **_SETTINGS,
            "stride": "i32",
            "vocab": "i32",
        },
        {"chunks": 1, "RANDOM": True, "CHUNK": CHUNK, "CHUNKS": 1},
        num_warps=8,
    ),
]
