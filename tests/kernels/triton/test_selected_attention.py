"""The Triton kernels that select positions, and attention to them, against the torch references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.paged_attention import AttentionParams
from quire.kernels.selected_attention import (
    TokenPlaces,
    attend_reference,
    attend_selected,
    select_positions,
    select_reference,
)
from tests.kernels.triton.cached import KEY_SCALE, PAGES, TOLERANCE, Cached, cache
from tests.support.variants import slow_but

KEY_DIM, VALUE_DIM, INDEX_DIM, HEADS = 64, 32, 32, 3
LENGTHS = [70, 0, 200, 5]


def pages_of(pages: str, dtype: torch.dtype, device: torch.device) -> Cached:
    torch.manual_seed(0)
    sizes = {"kv_heads": 1, "dim": KEY_DIM + INDEX_DIM, "value_dim": VALUE_DIM}
    return cache(LENGTHS, dtype=dtype, device=device, pages=pages, latent=True, block_size=4, **sizes)


def places_of(cached: Cached) -> TokenPlaces:
    """Three tokens of the first sequence, the padding, two tokens of the third, one of the last."""
    device = cached.tables.device
    sequences = torch.tensor([0, 0, 0, 1, 2, 2, 3], device=device)
    lengths = torch.tensor([3, 69, 70, 0, 150, 200, 5], device=device)
    return TokenPlaces(cached.tables, lengths, sequences, max_len=200)


def row(places: TokenPlaces, index: int) -> TokenPlaces:
    """The place of one token, with a table of its own."""
    assert places.sequences is not None
    sequence = int(places.sequences[index])
    return TokenPlaces(places.tables[sequence : sequence + 1], places.lengths[index : index + 1], max_len=333)


@pytest.mark.parametrize(
    ("pages", "dtype"),
    slow_but(
        [(pages, dtype) for pages in PAGES for dtype in (torch.float32, torch.bfloat16)],
        ("plain", torch.bfloat16),
        ("int8", torch.float32),
    ),
)
def test_selected_tokens(device: torch.device, pages: str, dtype: torch.dtype) -> None:
    """Positions and results equal those of the references, and those of each token alone."""
    cached = pages_of(pages, dtype, device)
    places, tokens, top_k = places_of(cached), 7, 20
    if pages == "plain":  # small integers, of which sums are exact: many scores are equal
        shape = cached.keys[..., KEY_DIM:].shape
        cached.keys[..., KEY_DIM:] = torch.randint(-2, 3, shape).to(device, dtype)
    queries = torch.randint(-2, 3, (tokens, 19, INDEX_DIM)).to(device, dtype)
    weights = torch.randint(-2, 3, (tokens, 19)).to(device, torch.float32)
    key_scale = KEY_SCALE if pages == "float8" else 1.0

    def select(rows: Tensor, of_rows: TokenPlaces) -> Tensor:
        return select_positions(queries[rows], weights[rows], cached.keys, of_rows, KEY_DIM, top_k, key_scale)

    every = torch.arange(tokens)
    positions = select(every, places)
    params = AttentionParams(0.3, key_scale=key_scale, value_scale=key_scale)
    q = torch.randn(tokens, HEADS, KEY_DIM + INDEX_DIM).to(device, dtype)
    q[..., KEY_DIM:] = 0.0

    def attend(rows: Tensor, of_rows: TokenPlaces) -> Tensor:
        return attend_selected(q[rows], cached.keys, cached.values, of_rows, positions[rows], KEY_DIM, params)

    out = attend(every, places)
    live = places.lengths > 0
    expected = select_reference(queries, weights, cached.keys, places, KEY_DIM, top_k, key_scale)
    exact = attend_reference(q.float(), *cached.exact, places, positions, params)
    torch.testing.assert_close(out[live].float(), exact[live], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for index, length in enumerate(places.lengths.tolist()):
        seen, alone = min(length, top_k), torch.tensor([index])
        if pages != "int8" or dtype is torch.float32:  # the interpreter rounds to bfloat16 in another way
            assert torch.equal(positions[index, :seen], expected[index, :seen])
        assert torch.equal(select(alone, row(places, index))[0, :seen], positions[index, :seen])
        if length:
            assert torch.equal(attend(alone, row(places, index))[0], out[index])
