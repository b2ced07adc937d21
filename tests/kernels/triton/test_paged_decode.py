"""The Triton kernel of decode attention against its torch reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import native, paged_attention
from quire.kernels.paged_attention import AttentionParams, attend_singles, decode_reference
from tests.kernels.triton.cached import HEAD_SCALES, PAGES, TOLERANCE, Cached, cache, params, scales

FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEATURES = ["", "window", "softcap+sinks", "alibi", "window+softcap+sinks", "window+alibi"]


def decode(q: Tensor, cached: Cached, arguments: Mapping[str, Any], most: int | None = None) -> Tensor:
    from quire.kernels.triton.paged_decode import decode as kernel

    most = int(cached.lengths.max()) if most is None else most
    return kernel(q, cached.keys, cached.values, cached.tables, cached.lengths, max_seq_len=most, **arguments)


def check(q: Tensor, cached: Cached, arguments: dict[str, Any], reference: AttentionParams) -> None:
    """Equal to the reference; sequences without positions give 0; and each row alone has the same bits."""
    out = decode(q, cached, arguments)
    assert out.dtype == q.dtype
    expected = decode_reference(q.float(), *cached.exact, cached.tables, cached.lengths, reference)
    expected = torch.where(cached.lengths[:, None, None] > 0, expected, 0.0)
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    for row in range(len(q)):
        single = Cached(
            cached.keys, cached.values, cached.tables[row : row + 1], cached.lengths[row : row + 1].to(torch.int32)
        )
        assert torch.equal(decode(q[row : row + 1], single, arguments)[0], out[row])


@FEW
@given(
    lengths=st.lists(st.integers(0, 330), min_size=1, max_size=3),
    heads=st.sampled_from([(4, 4), (6, 2), (5, 1), (20, 1)]),
    dims=st.sampled_from([(32, 32), (20, 20), (72, 80), (96, 64), (16, 128)]),
    block_size=st.sampled_from([1, 5, 16, 32, 64]),
    dtype=st.sampled_from(list(TOLERANCE)),
    pages=st.sampled_from([*PAGES, HEAD_SCALES]),
    which=st.sampled_from(FEATURES),
    seed=st.integers(0, 1000),
)
@example(  # the shorter one alone has a single split
    lengths=[2, 257],
    heads=(4, 4),
    dims=(32, 32),
    block_size=16,
    dtype=torch.float32,
    pages=HEAD_SCALES,
    which="",
    seed=0,
)
def test_decode_equals_its_reference(
    device: torch.device,
    lengths: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    pages: str,
    which: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    (dim, value_dim), (query_heads, kv_heads) = dims, heads
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "dim": dim, "value_dim": value_dim, "block_size": block_size}
    cached = cache(lengths, dtype=dtype, device=device, pages=pages, **sizes)
    arguments, reference = scales(pages, params(query_heads, which, device), kv_heads)
    check(torch.randn(len(lengths), query_heads, dim).to(device, dtype), cached, arguments, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(80, 576, 512), (3, 24, 16)])
def test_latent_attention(
    device: torch.device, dtype: torch.dtype, pages: str, heads: int, dim: int, value_dim: int
) -> None:
    """Values are a view of the keys, also in int8 pages; several tiles of query heads."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"kv_heads": 1, "dim": dim, "value_dim": value_dim}
    cached = cache([37, 3], dtype=dtype, device=device, pages=pages, latent=True, **sizes)
    arguments, reference = scales(pages, {"scale": 0.05})
    if pages == "float8":  # values have the scale of the keys
        arguments["value_scale"] = 0.25
        reference = AttentionParams(0.05, key_scale=0.25, value_scale=0.25)
    check(torch.randn(2, heads, dim).to(device, dtype), cached, arguments, reference)


@pytest.mark.parametrize("which", ["", "window", "sinks"])
def test_bits_do_not_depend_on_the_number_of_programs(
    device: torch.device, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on the longest sequence that there may be; a long sequence has longer splits."""
    from quire.kernels.triton import paged_decode, tuning

    config = {"MAX_HEADS": 64, "BLOCK_N": 16, "SPLIT": 32, "MAX_SPLITS": 4, "num_warps": 4, "num_stages": 2}
    monkeypatch.setattr(tuning, "config", lambda *_, **__: config)
    torch.manual_seed(0)
    cached = cache([300, 31, 128, 129, 0], dtype=torch.float32, device=device)
    q, arguments = torch.randn(5, 4, 32, device=device), params(4, which, device)
    out = decode(q, cached, arguments, 300)
    expected = decode_reference(q, *cached.exact, cached.tables, cached.lengths, AttentionParams(**arguments))
    torch.testing.assert_close(out[:4], expected[:4], atol=2e-5, rtol=2e-5)
    assert torch.equal(decode(q, cached, arguments, 4096), out)
    monkeypatch.setattr(paged_decode, "_PROGRAMS", 1)
    assert torch.equal(decode(q, cached, arguments, 300), out)


def test_nan_stays_in_its_row_and_head(device: torch.device) -> None:
    torch.manual_seed(0)
    cached = cache([40, 20], dtype=torch.float32, device=device)
    q = torch.randn(2, 4, 32, device=device)
    q[1, 2] = torch.nan
    out = decode(q, cached, {"scale": 0.3})
    assert out[1, 2].isnan().all()
    out[1, 2] = 0.0
    assert out.isfinite().all()


def test_queries_with_strides_and_results_in_place(device: torch.device) -> None:
    torch.manual_seed(0)
    cached = cache([40, 300], dtype=torch.float32, device=device)
    rows, target = torch.randn(2, 4, 96, device=device), torch.full((3, 6, 32), 7.0, device=device)
    q = rows[..., 32:64]
    decode(q, cached, {"scale": 0.3, "out": target[:2, 1:5]})
    assert torch.equal(target[:2, 1:5], decode(q.contiguous(), cached, {"scale": 0.3}))
    assert (target[2] == 7).all()
    assert (target[:, [0, 5]] == 7).all()


def test_no_sequences(device: torch.device) -> None:
    cached = cache([1], dtype=torch.float32, device=device)
    none = Cached(cached.keys, cached.values, cached.tables[:0], cached.lengths[:0])
    assert decode(torch.empty(0, 4, 32, device=device), none, {"scale": 0.3}, 16).shape == (0, 4, 32)


def test_the_op_calls_the_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "decode_reference", None)
    cached = cache([40, 20], dtype=torch.float16, device=device)
    q, attention = torch.randn(2, 4, 32).to(device, torch.float16), AttentionParams(0.3, window=16)
    with native.disabled():
        out = attend_singles(q, cached.keys, cached.values, cached.tables, cached.lengths, 48, attention)
    assert torch.equal(out, decode(q, cached, {"scale": 0.3, "window": 16}))
