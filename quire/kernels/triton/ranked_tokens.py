"""Random tokens of rows with top-k or top-p, without a sort; a part of `choose_tokens`.

Tokens are in descending order of logits, equal ones by id. Where a set of them ends (the k most likely ones, those that
cover the probability p, those before the chosen one) is found by a search over the values of `ordered_key`, which
counts tokens or adds up weights. Weights are integers, so that the sums are exact.

A histogram of the tokens' distances from the largest logit first finds a few candidates that contain the set.
They are copied, and the searches read only these; where they are too many, the searches read the whole row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.variants import KernelVariant
from quire.kernels.triton.vocab import CHUNK, ROW_SETTINGS, largest_of_row, load_logits, of_key, ordered_key, to_integer

_CAPACITY = 4096  # candidates of a row
_BLOCK = 512  # tokens that a search reads at a time
DIGIT = tl.constexpr(4)  # bits of a key that a search finds at a time
PIVOTS = tl.constexpr(16)  # values of a digit
BINS = tl.constexpr(256)
BINS_PER_UNIT = tl.constexpr(8.0)  # by distance: 32 in all, where the integer weights have become 0
SMALLEST = tl.constexpr(0.999)  # of a bin's weights, relative to that at its end, in spite of rounding
RANGE = tl.constexpr(32.0)


@triton.jit
def is_ranked(temperatures, top_k, top_p, row):
    """Whether the token of a row is random, among those that top-k or top-p keep."""
    return (tl.load(temperatures + row) > 0) & ((tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1))


@triton.jit
def weights_of(scaled, best):
    """Integer weights of e^scaled, relative to that of the largest."""
    return to_integer(tl.exp(tl.where(scaled == best, 0.0, scaled - best)))


@triton.jit
def load_scaled(source, at, size, divisor, floor):
    """Logits over the temperature, and whether they are tokens that min-p keeps."""
    x = load_logits(source, at, size)
    scaled = tl.div_rn(x, divisor)
    return scaled, (x > -float("inf")) & (scaled >= floor)


@triton.jit
def distance_bins(scaled, best):
    """The bin of the histogram that each token is in."""
    distance = tl.where(scaled == best, 0.0, best - scaled)
    return tl.minimum(distance * BINS_PER_UNIT, BINS - 1.0).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=ROW_SETTINGS)
def candidates_kernel(
    logits,
    largest,
    temperatures,
    log_min_p,
    top_k,
    top_p,
    values,
    ids,
    counts,
    totals,
    stride,
    vocab,
    chunks,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The scaled logits and ids of a row's candidates, in order of ids; their number, or -1 if they are too many."""
    row = tl.program_id(0).to(tl.int64)
    if is_ranked(temperatures, top_k, top_p, row):
        temperature = tl.load(temperatures + row)
        k = tl.load(top_k + row)
        best = tl.div_rn(largest_of_row(largest, row, chunks, CHUNKS), temperature)
        floor = best + tl.load(log_min_p + row)
        histogram = tl.zeros((BINS,), tl.int32)
        total = tl.full((), 0, tl.int64)
        for begin in range(0, vocab, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            scaled, valid = load_scaled(logits + row * stride, at, vocab, temperature, floor)
            histogram += tl.histogram(distance_bins(scaled, best), BINS, mask=valid)
            total += tl.sum(tl.where(valid, weights_of(scaled, best), 0), 0)
        lanes = tl.arange(0, BINS)
        least = to_integer(tl.exp(-(lanes + 1).to(tl.float32) / BINS_PER_UNIT) * SMALLEST)
        covered = tl.cumsum(tl.where(lanes < BINS - 1, least * histogram, 0), 0)
        target = tl.load(top_p + row).to(tl.float64) * total.to(tl.float64)
        last_k = tl.sum((tl.cumsum(histogram, 0) < k).to(tl.int32), 0)
        last_p = tl.sum((covered.to(tl.float64) < target).to(tl.int32), 0)
        last = tl.where((k > 0) & (k < vocab), last_k, last_p)
        count = tl.sum(tl.where(lanes <= last, histogram, 0), 0)
        tl.store(totals + row, total)
        tl.store(counts + row, tl.where(count <= CAPACITY, count, -1).to(tl.int32))
        if count <= CAPACITY:
            stored = tl.full((), 0, tl.int32)
            for begin in range(0, vocab, CHUNK):
                at = begin + tl.arange(0, CHUNK)
                scaled, valid = load_scaled(logits + row * stride, at, vocab, temperature, floor)
                chosen = valid & (distance_bins(scaled, best) <= last)
                here = tl.sum(chosen.to(tl.int32), 0).to(tl.int32)
                if here > 0:
                    place = row * CAPACITY + stored + tl.cumsum(chosen.to(tl.int32), 0) - 1
                    tl.store(values + place, scaled, mask=chosen)
                    tl.store(ids + place, at, mask=chosen)
                stored += here


@triton.jit
def measure(source, size, divisor, best, floor, key, BLOCK: tl.constexpr):
    """The number and the weights of the tokens whose keys are at least `key`."""
    count = tl.full((), 0, tl.int64)
    mass = tl.full((), 0, tl.int64)
    for begin in range(0, size, BLOCK):
        scaled, valid = load_scaled(source, begin + tl.arange(0, BLOCK), size, divisor, floor)
        chosen = valid & (ordered_key(scaled) >= key)
        count += tl.sum(chosen.to(tl.int64), 0)
        mass += tl.sum(tl.where(chosen, weights_of(scaled, best), 0), 0)
    return count, mass


@triton.jit
def find_key(source, size, divisor, best, floor, target, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key where `measure` reaches the target, digit by digit. Tokens below the range have no weight."""
    low = ordered_key(best - RANGE).to(tl.int64)
    for step in range(8):
        pivots = low + (tl.arange(0, PIVOTS).to(tl.int64) << (28 - DIGIT * step))
        reached = tl.zeros((PIVOTS,), tl.int64)
        for begin in range(0, size, BLOCK):
            scaled, valid = load_scaled(source, begin + tl.arange(0, BLOCK), size, divisor, floor)
            amounts = valid.to(tl.int64)
            if not BY_COUNT:
                amounts = tl.where(valid, weights_of(scaled, best), 0)
            above = ordered_key(scaled)[None, :] >= pivots[:, None]
            reached += tl.sum(tl.where(above, amounts[None, :], 0), 1)
        enough = (reached >= target).to(tl.int64)  # of the first pivots
        low = tl.max(tl.where(tl.arange(0, PIVOTS) < tl.sum(enough, 0), pivots, low), 0)
    return low


@triton.jit
def find_end(source, size, divisor, best, floor, target, BLOCK: tl.constexpr):
    """Where the running sum of weights reaches the target: the key, the number of tokens with that key up to there,
    and the running sum."""
    key = find_key(source, size, divisor, best, floor, target, False, BLOCK)
    _, above = measure(source, size, divisor, best, floor, key + 1, BLOCK)
    weight = tl.maximum(weights_of(of_key(key.to(tl.int32)), best), 1)
    ties = (target - above + weight - 1) // weight
    return key, ties, above + ties * weight


@triton.jit(do_not_specialize_on_alignment=ROW_SETTINGS)
def choose_ranked_kernel(
    logits,
    largest,
    temperatures,
    randoms,
    log_min_p,
    top_k,
    top_p,
    values,
    ids,
    counts,
    totals,
    out,
    stride,
    vocab,
    chunks,
    CAPACITY: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of a row where the running sum of kept weights, in descending order, exceeds random * their total."""
    row = tl.program_id(0).to(tl.int64)
    if is_ranked(temperatures, top_k, top_p, row) & (tl.load(out + row) >= 0):
        divisor = tl.load(temperatures + row)
        best = tl.div_rn(largest_of_row(largest, row, chunks, CHUNKS), divisor)
        floor = best + tl.load(log_min_p + row)
        count = tl.load(counts + row)
        source = logits + row * stride
        size = tl.full((), 0, tl.int32) + vocab
        if count >= 0:
            source = values + row * CAPACITY
            divisor = tl.full((), 1.0, tl.float32)
            size = count
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        total = tl.load(totals + row)
        if (k > 0) & (k < vocab):
            key = find_key(source, size, divisor, best, floor, k, True, BLOCK)
            above_count, above = measure(source, size, divisor, best, floor, key + 1, BLOCK)
            at_least, _ = measure(source, size, divisor, best, floor, key, BLOCK)
            ties = tl.minimum(at_least, k.to(tl.int64)) - above_count
            total = above + ties * weights_of(of_key(key.to(tl.int32)), best)
        if p < 1:
            target = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            target = tl.minimum(tl.maximum(target, 1), total)
            _, _, total = find_end(source, size, divisor, best, floor, target, BLOCK)
        target = (tl.load(randoms + row) * total.to(tl.float64)).to(tl.int64) + 1
        key, index, _ = find_end(source, size, divisor, best, floor, tl.minimum(target, total), BLOCK)
        seen = tl.full((), 0, tl.int64)
        for begin in range(0, size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            scaled, valid = load_scaled(source, at, size, divisor, floor)
            same = (valid & (ordered_key(scaled) == key)).to(tl.int64)
            here = tl.sum(same, 0)
            if (seen < index) & (index <= seen + here):
                is_chosen = (same > 0) & (seen + tl.cumsum(same, 0) == index)
                token = tl.min(tl.where(is_chosen, at, vocab), 0).to(tl.int32)
                if count >= 0:
                    token = tl.load(ids + row * CAPACITY + token)
                tl.store(out + row, token.to(tl.int64))
            seen += here


def choose_ranked(
    logits: Tensor,
    largest: Tensor,
    temperatures: Tensor,
    randoms: Tensor,
    log_min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    out: Tensor,
) -> None:
    """Overwrite the tokens in `out` of rows with top-k or top-p that have one.

    Args:
        logits: (rows, vocab) float32, last stride 1.
        largest: (rows, chunks) float32, the largest logits of chunks of `vocab.CHUNK` tokens.
        temperatures: (rows,) float32, like log_min_p and top_p.
        randoms: (rows,) float64.
        top_k: (rows,) int32.
        out: (rows,) int64.
    """
    (rows, vocab), chunks, device = logits.shape, largest.shape[1], logits.device
    values = torch.empty((rows, _CAPACITY), dtype=torch.float32, device=device)
    ids = torch.empty((rows, _CAPACITY), dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    totals = torch.empty(rows, dtype=torch.int64, device=device)
    sizes = logits.stride(0), vocab, chunks
    candidates, width = (values, ids, counts, totals), triton.next_power_of_2(chunks)
    candidates_kernel[(rows,)](
        logits,
        largest,
        temperatures,
        log_min_p,
        top_k,
        top_p,
        *candidates,
        *sizes,
        CAPACITY=_CAPACITY,
        CHUNK=CHUNK,
        CHUNKS=width,
        num_warps=16,
    )
    choose_ranked_kernel[(rows,)](
        logits,
        largest,
        temperatures,
        randoms,
        log_min_p,
        top_k,
        top_p,
        *candidates,
        out,
        *sizes,
        CAPACITY=_CAPACITY,
        CHUNKS=width,
        BLOCK=_BLOCK,
        num_warps=8,
    )


_SIGNATURE = {
    **dict.fromkeys(("logits", "largest", "temperatures", "log_min_p", "top_p", "values"), "*fp32"),
    **dict.fromkeys(("top_k", "ids", "counts"), "*i32"),
    "totals": "*i64",
    **dict.fromkeys(("stride", "vocab", "chunks"), "i32"),
}
VARIANTS = [
    KernelVariant(candidates_kernel, _SIGNATURE, {"CAPACITY": _CAPACITY, "CHUNK": CHUNK, "CHUNKS": 64}, num_warps=16),
    KernelVariant(
        choose_ranked_kernel,
        {**_SIGNATURE, "randoms": "*fp64", "out": "*i64"},
        {"CAPACITY": _CAPACITY, "CHUNKS": 64, "BLOCK": _BLOCK},
        num_warps=8,
    ),
    *(  # Triton makes integers that are 1 constants
        KernelVariant(
            kernel, {name: kind for name, kind in signature.items() if name != "chunks"}, constants, num_warps=8
        )
        for kernel, signature, constants in (
            (candidates_kernel, _SIGNATURE, {"chunks": 1, "CAPACITY": _CAPACITY, "CHUNK": CHUNK, "CHUNKS": 1}),
            (
                choose_ranked_kernel,
                {**_SIGNATURE, "randoms": "*fp64", "out": "*i64"},
                {"chunks": 1, "CAPACITY": _CAPACITY, "CHUNKS": 1, "BLOCK": _BLOCK},
            ),
        )
    ),
]
