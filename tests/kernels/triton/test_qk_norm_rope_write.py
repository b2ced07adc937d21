"""The Triton kernel that norms and rotates heads and writes keys and values, against the ops that it replaces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import native, rope
from quire.kernels.int8_pages import scale_bytes
from quire.kernels.projected_heads import CosSin, ProjectedHeads, QKNormWeights
from quire.kernels.qk_norm_rope_write import in_two_ops, qk_norm_rope_write
from quire.kernels.rms_norm import reference as rms_norm_reference
from quire.kernels.write_pages import triton_supports, write_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAGES = [None, torch.int8, torch.float8_e4m3fn]  # None: the dtype of the heads
SCALES = (0.3, 2.0)  # of float8 pages
BLOCKS, BLOCK_SIZE = 3, 5
_ROW = 16  # bytes that rows of pages are multiples of


@pytest.fixture(autouse=True)
def _without_compiled_kernels(device: torch.device) -> Iterator[None]:
    with native.disabled():
        yield


def projection(
    tokens: int,
    heads: int,
    kv_heads: int,
    *,
    pairs: int = 0,
    unrotated: int = 0,
    offset: float | None = None,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float32,
) -> ProjectedHeads:
    """Random heads between columns of NaN. `pairs`: 0 for no rotation; `offset`: of the norms, None for no norms."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dim = 2 * pairs + unrotated
    size = (heads + 2 * kv_heads) * dim
    memory = torch.full((tokens, size + 14), math.nan, dtype=dtype, device=device)
    memory[:, 3 : size + 3] = 3 * torch.randn(tokens, size, device=device)
    weights = [torch.randn(dim, device=device).to(dtype) for _ in range(2)]
    angle = torch.randn(tokens, pairs, device=device) * 3
    return ProjectedHeads(
        memory[:, 3 : size + 3],
        heads,
        kv_heads,
        None if offset is None else QKNormWeights(weights[0], weights[1], 1e-6, offset),
        CosSin(angle.cos(), angle.sin(), interleaved) if pairs else None,
    )


def empty_pages(heads: ProjectedHeads, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Keys and values with a pattern in each byte, in rows that are aligned as those of the engine."""
    dtype, dim = dtype or heads.qkv.dtype, heads.split.shape[2]
    scale = scale_bytes(dim) if dtype is torch.int8 else 0
    header = -(-scale // _ROW) * _ROW
    taken = header + -(-dim * dtype.itemsize // _ROW) * _ROW
    shape = (BLOCKS, heads.kv_heads, BLOCK_SIZE, taken)

    def pages() -> Tensor:
        memory = torch.full(shape, 7, dtype=torch.uint8, device=heads.qkv.device).view(dtype).transpose(0, 1)
        begin = (header - scale) // dtype.itemsize
        return memory[..., begin : begin + scale + dim]

    keys, values = pages(), pages()
    assert triton_supports(keys, values)
    return keys, values


def assert_same_bits(actual: Tensor, other: Tensor) -> None:
    """Equal also in NaN and in the signs of zeros."""
    assert actual.dtype == other.dtype
    assert torch.equal(actual.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@settings(deadline=None, max_examples=60)
@given(
    slots=st.permutations([*range(BLOCKS * BLOCK_SIZE), -1, -1, -7]).flatmap(
        lambda slots: st.integers(0, 4).map(lambda tokens: slots[:tokens])
    ),
    heads=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    pairs=st.integers(0, 20),
    unrotated=st.integers(1, 9),
    offset=st.sampled_from([None, 0.0, 1.0]),
    interleaved=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    page_dtype=st.sampled_from(PAGES),
    of_heads=st.booleans(),
)
def test_queries_and_pages_have_the_bits_of_two_ops(
    slots: list[int],
    heads: int,
    kv_heads: int,
    pairs: int,
    unrotated: int,
    offset: float | None,
    interleaved: bool,
    dtype: torch.dtype,
    page_dtype: torch.dtype | None,
    of_heads: bool,
) -> None:
    """All bytes of the pages, also those of other slots."""
    projected = projection(
        len(slots),
        heads,
        kv_heads,
        pairs=pairs,
        unrotated=unrotated,
        offset=offset,
        interleaved=interleaved,
        dtype=dtype,
    )
    pages, expected = empty_pages(projected, page_dtype), empty_pages(projected, page_dtype)
    at = torch.tensor(slots, dtype=torch.int64, device=projected.qkv.device)
    head_scales = torch.tensor([[0.5, 3.0, 0.1], [2.0, 0.7, 1.0]], device=at.device)[:, :kv_heads].contiguous()
    scales: tuple[Any, ...] = (*SCALES, head_scales) if of_heads else SCALES
    expected_q = in_two_ops(replace(projected, qkv=projected.qkv.clone()), *expected, at, *scales)
    q = qk_norm_rope_write(projected, *pages, at, *scales)
    assert q.shape == (len(slots), heads, 2 * pairs + unrotated)
    for actual, other in zip((q, *pages), (expected_q, *expected), strict=True):
        assert_same_bits(actual, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_dtype", PAGES)
@pytest.mark.parametrize("odd", [math.nan, math.inf, 60000.0, 0.0])
def test_rows_with_odd_elements(
    device: torch.device, odd: float, page_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    """One element of a row, and in the last token all of them."""
    heads = projection(3, 2, 2, pairs=3, unrotated=4, offset=0.0, dtype=dtype)
    heads.split[1, :, 4] = odd
    heads.split[2] = odd
    pages, expected = empty_pages(heads, page_dtype), empty_pages(heads, page_dtype)
    slots = torch.tensor([4, 9, 1], device=device)
    expected_q = in_two_ops(replace(heads, qkv=heads.qkv.clone()), *expected, slots, *SCALES)
    q = qk_norm_rope_write(heads, *pages, slots, *SCALES)
    for actual, other in zip((q, *pages), (expected_q, *expected), strict=True):
        assert_same_bits(actual, other)


@pytest.mark.parametrize("heads", [(40, 20), (20, 1), (3, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_that_of_torch(device: torch.device, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """Of more heads than a program has, of one head of keys, and of as many keys as queries."""
    projected = projection(2, *heads, pairs=24, unrotated=32, offset=1.0, interleaved=True, dtype=dtype)
    assert projected.norms is not None
    assert projected.angles is not None
    q, k, v = projected.split.split((heads[0], heads[1], heads[1]), 1)
    q, k = (
        rope.reference(
            rms_norm_reference(x, weight, 1e-6, 1.0), projected.angles.cos, projected.angles.sin, interleaved=True
        )
        for x, weight in ((q, projected.norms.query), (k, projected.norms.key))
    )
    pages, expected = empty_pages(projected), empty_pages(projected)
    slots = torch.tensor([6, 14], device=device)
    write_reference(*expected, slots, k, v)
    atol, rtol = (2e-6, 1e-5) if dtype == torch.float32 else (0.06, 0.02)  # the reference rounds several times
    actual = qk_norm_rope_write(projected, *pages, slots)
    torch.testing.assert_close(actual, q, atol=atol, rtol=rtol)
    torch.testing.assert_close(pages[0], expected[0], atol=atol, rtol=rtol)
    assert_same_bits(pages[1], expected[1])


@pytest.mark.parametrize("page_dtype", PAGES)
def test_a_token_does_not_depend_on_the_others(device: torch.device, page_dtype: torch.dtype | None) -> None:
    heads = projection(9, 6, 2, pairs=12, unrotated=8, offset=0.0, dtype=torch.bfloat16)
    assert heads.angles is not None
    slots = torch.arange(9, device=device)
    together = empty_pages(heads, page_dtype)
    q = qk_norm_rope_write(heads, *together, slots, *SCALES)
    alone = empty_pages(heads, page_dtype)
    for token in range(9):
        row = slice(token, token + 1)
        angles = replace(heads.angles, cos=heads.angles.cos[row], sin=heads.angles.sin[row])
        single = replace(heads, qkv=heads.qkv[row], angles=angles)
        assert_same_bits(qk_norm_rope_write(single, *alone, slots[row], *SCALES), q[row])
    for page, other in zip(alone, together, strict=True):
        assert_same_bits(page, other)
