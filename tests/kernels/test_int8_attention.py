"""Attention of bfloat16 queries to pages of int8, whose products are of integers where the processor has them.

The reference is torch's attention in float32 to the same rows.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.int8_pages import scale_bytes
from quire.kernels.paged_attention import AttentionMetadata, AttentionParams, paged_decode, paged_prefill, paged_varlen
from quire.kernels.write_pages import write_pages
from tests.support.variants import slow_but
from tests.support.visible import visible_bounds

compiled = pytest.mark.skipif(native.instructions() is None, reason="torch's sums have other orders")
BLOCK = 16
BORDERS = (1, 4, 31, 33, 255, 256, 257, 511, 512, 513)  # positions, around those of panels and chunks
SIZES = ((64, 64), (96, 32), (128, 128), (96, 160), (256, 256))  # of keys and values; some have a last group of 32
# Of the largest output. Elements of queries and softmax weights are rounded to 1/127 and 1/255 of the largest ones that
# share their scale, so scores of products of 64 to 576 elements are off by some thousandths, and weights by as many of
# themselves. The worst of all outputs here is off by 0.017, and those of a single wrong scale by far more.
TOLERANCE = 0.025
PARAMS = {
    "plain": AttentionParams(0.125),
    "window": AttentionParams(0.125, window=270),
    "narrow": AttentionParams(0.125, window=7),
    "softcap": AttentionParams(0.125, softcap=2.0),
    "sinks": AttentionParams(0.125, sinks=torch.tensor([1.0, -2.0, 0.5, 3.0])),
    "all": AttentionParams(0.125, window=300, softcap=5.0, sinks=torch.tensor([1.0, -2.0, 0.5, 3.0])),
}


class Pages:
    """Int8 pages of two heads with shuffled blocks; block 0 holds NaN."""

    def __init__(self, positions: int, dim: int, value_dim: int, seed: int = 0, latent: bool = False) -> None:
        torch.manual_seed(seed)
        blocks, kv_heads = -(-positions // BLOCK), 1 if latent else 2
        self.keys, self.values = (
            torch.full((kv_heads, 1 + blocks, BLOCK, scale_bytes(width) + width), -1, dtype=torch.int8)
            for width in (dim, value_dim)
        )
        if latent:
            self.values = self.keys[..., scale_bytes(dim) - scale_bytes(value_dim) : scale_bytes(dim) + value_dim]
        self.table = 1 + torch.randperm(blocks).int()
        k, v = torch.randn(positions, kv_heads, dim), torch.randn(positions, kv_heads, value_dim)
        self.write(torch.arange(positions), k, None if latent else v)

    def write(self, positions: Tensor, k: Tensor, v: Tensor | None) -> None:
        slots = self.table[positions // BLOCK] * BLOCK + positions % BLOCK
        write_pages(self.keys, self.values, slots, k.bfloat16(), None if v is None else v.bfloat16())

    def decode(self, q: Tensor, lengths: Tensor, params: AttentionParams) -> Tensor:
        return paged_decode(q, self.keys, self.values, self.table.expand(len(q), -1), lengths, params)

    def prefill(self, q: Tensor, length: int, params: AttentionParams, visible: Tensor | None = None) -> Tensor:
        return paged_prefill(q, self.keys, self.values, self.table, length, params, visible)


def queries(count: int, dim: int) -> Tensor:
    return torch.randn(count, 4, dim).bfloat16()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert (actual.float() - expected).abs().max() < TOLERANCE * expected.abs().max()


def checked_span(pages: Pages, q: Tensor, length: int, params: AttentionParams) -> Tensor:
    """Return attention of a span: close to the reference, and tokens have the same bits alone."""
    span = pages.prefill(q, length, params)
    with native.disabled():
        assert_close(span, pages.prefill(q.float(), length, params))
    assert torch.equal(pages.decode(q, torch.arange(length - len(q), length) + 1, params), span)
    return span


@compiled
@pytest.mark.parametrize(("dim", "value_dim"), SIZES)
@pytest.mark.parametrize("name", PARAMS)
def test_single_queries(dim: int, value_dim: int, name: str) -> None:
    """Close to the reference, and those of a call have the same bits as each alone."""
    pages, params = Pages(max(BORDERS), dim, value_dim), replace(PARAMS[name], scale=dim**-0.5)
    q, lengths = queries(len(BORDERS), dim), torch.tensor(BORDERS)
    together = pages.decode(q, lengths, params)
    with native.disabled():
        expected = pages.decode(q.float(), lengths, params)
    assert_close(together, expected)
    for row in range(len(q)):
        assert torch.equal(pages.decode(q[row : row + 1], lengths[row : row + 1], params)[0], together[row])


@compiled
@pytest.mark.parametrize(("dim", "value_dim"), SIZES)
@pytest.mark.parametrize(
    ("name", "length"),
    slow_but(product(PARAMS, (33, 257, 513)), ("plain", 513), ("all", 513), ("window", 257), ("narrow", 33)),
)
def test_spans(dim: int, value_dim: int, name: str, length: int) -> None:
    """Close to the reference; tokens have the same bits alone, and in shorter spans."""
    pages, params = Pages(length, dim, value_dim), replace(PARAMS[name], scale=dim**-0.5)
    count = length - 20
    q = queries(count, dim)
    span = checked_span(pages, q, length, params)
    for rows in (2, 5, 11):
        part = pages.prefill(q[:rows], length - count + rows, params)
        assert torch.equal(part, span[:rows])


@compiled
@pytest.mark.parametrize("dim", [64, 96, 256])
@pytest.mark.parametrize("name", ["plain", "softcap"])
def test_queries_whose_parts_differ_in_size(dim: int, name: str) -> None:
    """Parts of 16 elements that are up to 2^8 times smaller than the largest one have as many digits as it."""
    pages, q = Pages(300, dim, 64), queries(40, dim)
    sizes = [2.0**-exponent for exponent in (0, 3, 7, 20, 8, 1, 5, 12, 2, 4, 6, 9, 0, 10, 15, 3)][: dim // 16]
    q *= torch.tensor(sizes).bfloat16().repeat_interleave(16)
    q[::3] = q[::3].flip(-1)
    checked_span(pages, q, 300, replace(PARAMS[name], scale=0.5))


@compiled
@pytest.mark.parametrize("first", [-40.0, 0.0, 40.0])
@pytest.mark.parametrize("name", ["plain", "window", "sinks"])
def test_chunks_whose_first_score_is_far_from_others(name: str, first: float) -> None:
    """Weights are relative to that of the first position seen, unless others would be too large for it."""
    pages, q = Pages(600, 64, 64), queries(40, 64).abs()
    starts = torch.tensor([0, 256, 512])
    pages.write(starts, torch.full((3, 2, 64), first), torch.randn(3, 2, 64))
    checked_span(pages, q, 600, PARAMS[name])


@compiled
@pytest.mark.parametrize("name", PARAMS)
def test_latent_values(name: str) -> None:
    """Values are the first elements of keys, as in models with latent attention."""
    pages, params = Pages(300, 576, 512, latent=True), replace(PARAMS[name], scale=576**-0.5)
    checked_span(pages, queries(280, 576), 300, params)


@compiled
def test_spans_and_single_queries_in_one_call() -> None:
    pages = Pages(600, 64, 64)
    counts, lengths = [1, 1, 30, 2, 90], torch.tensor([600, 256, 290, 258, 600])
    q = queries(sum(counts), 64)
    spans = AttentionMetadata(pages.table.expand(5, -1), lengths, torch.tensor([2, 5, *counts]))
    together = paged_varlen(q, pages.keys, pages.values, spans, PARAMS["plain"]).split(counts)
    for part, out, length in zip(q.split(counts), together, lengths.tolist(), strict=True):
        assert torch.equal(pages.prefill(part, length, PARAMS["plain"]), out)


@compiled
@pytest.mark.parametrize("ignores_windows", [False, True])
@pytest.mark.parametrize("name", ["plain", "window", "all"])
def test_attention_in_both_directions(name: str, ignores_windows: bool) -> None:
    length, params = 330, PARAMS[name]
    pages, q = Pages(length, 64, 64), queries(length, 64)
    bounds = visible_bounds(length, ((7, 30), (140, 320)), ignores_windows=ignores_windows)
    out = pages.prefill(q, length, params, bounds)
    with native.disabled():
        expected = pages.prefill(q.float(), length, params, bounds)
    assert_close(out, expected)
    part = pages.prefill(q[130:320], 320, params, bounds[130:320])
    assert torch.equal(part, out[130:320])


@compiled
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_only_queries_that_see_a_row_with_nan_or_inf_are_not_finite(
    odd: float, of_keys: bool, window: int | None
) -> None:
    """All of their output if it is of a key, else the 64 elements that share its scale."""
    if not (of_keys or native.instructions() in ("avx512bf16", "avx512vnni")):
        pytest.skip("spans multiply weights of 0 with values where products are of floats")
    pages, place = Pages(120, 128, 128), 70
    k, v = torch.randn(1, 2, 128), torch.randn(1, 2, 128)
    (k if of_keys else v)[0, 1, 100] = odd
    pages.write(torch.tensor([place]), k, v)
    q, params = queries(120, 128), AttentionParams(0.1, window=window)
    span = pages.prefill(q, 120, params)
    alone = pages.decode(q, torch.arange(120) + 1, params)
    end = place + (window or 50)
    for out in (span, alone):
        finite = out.isfinite()
        assert finite[:place].all()
        assert finite[end:].all()
        assert finite[:, :2].all()
        assert not finite[place:end, 2:, 0 if of_keys else 64 :].any()
        assert finite[place:end, 2:, :64].all() or of_keys


@compiled
def test_queries_with_nan_or_inf_are_not_finite() -> None:
    """Others of the same call are."""
    pages, q = Pages(50, 64, 64), queries(40, 64)
    q[3, 1, 5], q[7, 2, 60] = torch.nan, torch.inf
    for out in (
        pages.prefill(q, 50, PARAMS["plain"]),
        pages.decode(q, torch.arange(10, 50) + 1, PARAMS["plain"]),
    ):
        rows = out.isfinite().all(2)
        assert [tuple(row) for row in (~rows).nonzero().tolist()] == [(3, 1), (7, 2)]
        assert not out[3, 1].isfinite().any()
        assert not out[7, 2].isfinite().any()


@compiled
def test_small_values_beside_rows_of_zeros_are_exact() -> None:
    """Zeros take nothing of the range of weights."""
    pages = Pages(64, 64, 64)
    k, v = torch.randn(64, 2, 64), 1e-4 * torch.randn(64, 2, 64)
    v[::2] = 0.0
    pages.write(torch.arange(64), k, v)
    q = queries(60, 64)
    with native.disabled():
        expected = pages.prefill(q.float(), 64, PARAMS["plain"])
    assert_close(pages.prefill(q, 64, PARAMS["plain"]), expected)


@compiled
def test_scores_of_large_queries_and_keys() -> None:
    """A position whose score is far above the others has all of the weight."""
    pages, q = Pages(100, 64, 64), queries(90, 64)
    k, v = 1000 * q[-1:, ::2].float(), torch.randn(1, 2, 64)
    pages.write(torch.tensor([55]), k, v)
    out = pages.prefill(1000 * q, 100, PARAMS["plain"])[-1, ::2]
    with native.disabled():
        (expected,) = pages.decode(1000 * q[-1:].float(), torch.tensor([100]), PARAMS["plain"])
    assert_close(out, expected[::2])
    assert_close(out, v[0])
