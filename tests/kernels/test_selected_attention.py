"""Selection of positions by an indexer, and attention to them, by the compiled kernels and in torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import CapturedCalls, Workspace
from quire.kernels.copy_rows import copy_rows
from quire.kernels.int8_pages import quantize_rows
from quire.kernels.paged_attention import AttentionParams
from quire.kernels.selected_attention import (
    TokenPlaces,
    attend_reference,
    attend_selected,
    select_positions,
    select_reference,
)

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="installed without a compiler")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
BLOCK, INDEX_DIM = 4, 64
PARAMS = AttentionParams(0.1)


@dataclass(frozen=True)
class Cached:
    """Pages of keys, whose first elements are values and whose last ones are the indexer's keys, and tokens."""

    keys: Tensor
    values: Tensor
    key_dim: int
    places: TokenPlaces

    def row(self, row: int) -> TokenPlaces:
        return self.places.of_rows(torch.tensor([row]))


def cached(
    dtype: torch.dtype, *, key_dim: int = 96, value_dim: int = 64, is_int8: bool = False, seed: int = 0
) -> Cached:
    """Three sequences of 5 to 700 positions in mixed blocks, with a span of tokens each."""
    torch.manual_seed(seed)
    lengths, counts = [40, 700, 5], [3, 11, 5]
    blocks = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(blocks) + 2)
    tables = torch.zeros(3, max(blocks), dtype=torch.int32)
    for index, part in enumerate(order[: sum(blocks)].split(blocks)):
        tables[index, : len(part)] = part
    rows = torch.randn(1, len(order), BLOCK, key_dim + INDEX_DIM).to(dtype)
    rows[..., key_dim:] = torch.randint(-3, 4, rows[..., key_dim:].shape).to(dtype)
    keys = quantize_rows(rows) if is_int8 else rows
    begin = keys.shape[-1] - key_dim - INDEX_DIM if is_int8 else 0
    values = keys[..., begin - value_dim // 64 * 4 if is_int8 else 0 : begin + value_dim]
    seen = [torch.arange(length - count + 1, length + 1) for length, count in zip(lengths, counts, strict=True)]
    sequences = torch.arange(3).repeat_interleave(torch.tensor(counts))
    return Cached(keys, values, key_dim, TokenPlaces(tables, torch.cat(seen), sequences))


def index_queries(tokens: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Small integers, of which sums are exact in any order; many scores are equal."""
    queries = torch.randint(-2, 3, (tokens, heads, INDEX_DIM)).to(dtype)
    return queries, torch.randint(-1, 3, (tokens, heads)).float()


@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 9), top_k=st.sampled_from([1, 7, 32, 300, 699, 700, 900]), dtype=st.sampled_from(DTYPES),
    is_int8=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_selected_positions(heads: int, top_k: int, dtype: torch.dtype, is_int8: bool, seed: int) -> None:
    """Those of the reference, also where scores are equal; each token alone has the same."""
    pages = cached(dtype, is_int8=is_int8, seed=seed)
    places, count = pages.places, len(pages.places.lengths)
    queries, weights = index_queries(count, heads, dtype)

    def select(rows: Tensor, of_rows: TokenPlaces) -> Tensor:
        return select_positions(queries[rows], weights[rows], pages.keys, of_rows, pages.key_dim, top_k, 1.0)

    positions = select(torch.arange(count), places)
    if not is_int8:  # whose keys are no integers
        expected = select_reference(queries, weights, pages.keys, places, pages.key_dim, top_k, 1.0)
        assert torch.equal(positions, expected)
    for row, length in enumerate(places.lengths.tolist()):
        used = positions[row, : min(length, top_k)]
        assert used.tolist() == sorted(set(used.tolist()))
        assert used.max() < length
        assert torch.equal(select(torch.tensor([row]), pages.row(row))[0, : len(used)], used)


@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 9), top_k=st.sampled_from([1, 7, 32, 300, 600]), dtype=st.sampled_from(DTYPES),
    is_int8=st.booleans(), key_dim=st.sampled_from([96, 72]), seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_to_selected_positions(
    heads: int, top_k: int, dtype: torch.dtype, is_int8: bool, key_dim: int, seed: int
) -> None:
    """Each token alone has the same bits; in bfloat16, so have some of its heads."""
    key_dim = 96 if is_int8 else key_dim
    pages = cached(dtype, key_dim=key_dim, is_int8=is_int8, seed=seed)
    places, count = pages.places, len(pages.places.lengths)
    q = torch.randn(count, heads, key_dim + INDEX_DIM).to(dtype)
    q[..., key_dim:] = 0.0
    positions = torch.stack([torch.randperm(700)[:top_k].sort().values for _ in range(count)]).int()
    for row, length in enumerate(places.lengths.tolist()):  # fewer than 700
        seen = min(length, top_k)
        positions[row, :seen] = torch.randperm(length)[:seen].sort().values.int()
    if key_dim % 32:
        wide = torch.zeros(*pages.keys.shape[:3], 160, dtype=dtype)
        wide[..., : pages.keys.shape[3]] = pages.keys
        pages, q = replace(pages, keys=wide, values=wide[..., :64]), torch.nn.functional.pad(q, (0, 160 - q.shape[2]))

    def attend(rows: Tensor, of_rows: TokenPlaces, heads: int = heads) -> Tensor:
        queries = q[rows, :heads].contiguous()
        return attend_selected(queries, pages.keys, pages.values, of_rows, positions[rows], key_dim, PARAMS)

    out = attend(torch.arange(count), places)
    expected = attend_reference(q, pages.keys, pages.values, places, positions, PARAMS)
    tolerance = 0.03 if is_int8 and dtype is torch.bfloat16 else TOLERANCE[dtype]  # products are of integers
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for row in range(count):
        assert torch.equal(attend(torch.tensor([row]), pages.row(row))[0], out[row])
    few = attend(torch.arange(count), places, heads=1)
    assert dtype is torch.float32 or torch.equal(few, out[:, :1])


def test_captured_calls_take_other_tokens() -> None:
    """With tables of their own, which become longer."""
    pages = cached(torch.bfloat16)
    tables = pages.places.tables[torch.tensor([1, 0, 1, 1])].contiguous()
    lengths = torch.tensor([20, 30, 40, 50])
    queries, weights = index_queries(4, 4, torch.bfloat16)
    q = torch.randn(4, 8, pages.key_dim + INDEX_DIM).bfloat16()
    q[..., pages.key_dim :] = 0.0

    result = torch.zeros(4, 8, 64, dtype=torch.bfloat16)

    def compute(count: int) -> None:
        places = TokenPlaces(tables[:count], lengths[:count])
        positions = select_positions(queries[:count], weights[:count], pages.keys, places, pages.key_dim, 24, 1.0)
        out = attend_selected(q[:count], pages.keys, pages.values, places, positions, pages.key_dim, PARAMS)
        copy_rows(out, result[:count])

    captured = CapturedCalls(lambda: compute(1), Workspace(4), (1, 1))
    assert captured.complete
    for seen in (lengths, torch.tensor([600, 24, 25, 699])):
        lengths.copy_(seen)
        captured.replay((4, 4))
        replayed = result.clone()
        compute(4)
        assert torch.equal(result, replayed)
