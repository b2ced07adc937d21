"""The Triton kernel of prefill attention against its torch reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import native, paged_attention
from quire.kernels.paged_attention import AttentionParams, attend_spans, paged_prefill, prefill_reference
from tests.kernels.triton.cached import HEAD_SCALES, PAGES, TOLERANCE, Cached, cache, params, scales
from tests.support.visible import visible_bounds

FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEATURES = ["", "window", "softcap+sinks", "alibi", "window+softcap+sinks", "window+alibi"]


def prefill(q: Tensor, cached: Cached, counts: Sequence[int], arguments: Mapping[str, Any], first: int = 0) -> Tensor:
    """Attention of spans of `counts` queries, which begin at the token `first`."""
    from quire.kernels.triton.paged_prefill import prefill as kernel

    starts = torch.tensor(list(accumulate(counts, initial=first)), dtype=torch.int32, device=q.device)
    return kernel(q, cached.keys, cached.values, cached.tables, cached.lengths, starts, **arguments)


def expected(q: Tensor, cached: Cached, counts: Sequence[int], reference: AttentionParams) -> Tensor:
    out = []
    for row, (begin, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        length = int(cached.lengths[row])
        table = cached.tables[row, : -(-length // cached.keys.shape[2])]
        if begin < end:
            out.append(prefill_reference(q[begin:end].float(), *cached.exact, table, length, reference))
    return torch.cat(out)


def rows_of(cached: Cached, row: int, length: int) -> Cached:
    """One sequence of `cached`, or its beginning."""
    lengths = torch.tensor([length], device=cached.tables.device)
    return Cached(cached.keys, cached.values, cached.tables[row : row + 1], lengths)


@FEW
@given(
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90)), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 4), (6, 2), (5, 1), (20, 1)]),
    dims=st.sampled_from([(32, 32), (20, 20), (72, 80), (96, 64), (16, 128)]),
    block_size=st.sampled_from([1, 5, 16, 32, 64]),
    dtype=st.sampled_from(list(TOLERANCE)),
    pages=st.sampled_from([*PAGES, HEAD_SCALES]),
    which=st.sampled_from(FEATURES),
    seed=st.integers(0, 1000),
)
def test_prefill_equals_its_reference(
    device: torch.device,
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    pages: str,
    which: str,
    seed: int,
) -> None:
    """And each span has the same bits alone, and in two chunks. `spans`: queries, and positions before them."""
    torch.manual_seed(seed)
    (dim, value_dim), (query_heads, kv_heads) = dims, heads
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "dim": dim, "value_dim": value_dim, "block_size": block_size}
    counts, lengths = [count for count, _ in spans], [count + before for count, before in spans]
    cached = cache(lengths, dtype=dtype, device=device, pages=pages, **sizes)
    arguments, reference = scales(pages, params(query_heads, which, device), kv_heads)
    q = torch.randn(sum(counts), query_heads, dim).to(device, dtype)
    out = prefill(q, cached, counts, arguments)
    if not len(q):
        return
    torch.testing.assert_close(
        out.float(), expected(q, cached, counts, reference), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    for row, (begin, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        half, length = (begin + end) // 2, lengths[row]
        chunks = ((begin, half, length - end + half), (half, end, length))
        parts = [prefill(q[a:b], rows_of(cached, row, n), [b - a], arguments) for a, b, n in chunks]
        assert torch.equal(torch.cat(parts), out[begin:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["", "window", "window+softcap+sinks"])
@pytest.mark.parametrize("ignores_windows", [False, True])
def test_attention_in_both_directions(
    device: torch.device, dtype: torch.dtype, which: str, ignores_windows: bool
) -> None:
    """Within spans; the same bits in chunks, of which one begins within a span."""
    torch.manual_seed(0)
    cached = cache([80, 30], dtype=dtype, device=device, kv_heads=2)
    arguments, reference = scales("", params(4, which, device))
    q = torch.randn(110, 4, 32).to(device, dtype)
    parts = (
        visible_bounds(80, [(5, 50), (60, 63)], ignores_windows=ignores_windows),
        visible_bounds(30, [(0, 30)], ignores_windows=ignores_windows),
    )
    bounds = torch.cat(parts).to(device)
    out = prefill(q, cached, [80, 30], {**arguments, "visible": bounds})
    exact = [
        prefill_reference(rows.float(), *cached.exact, cached.tables[row], length, reference, seen.to(device))
        for row, (length, rows, seen) in enumerate(zip((80, 30), q.split([80, 30]), parts, strict=True))
    ]
    torch.testing.assert_close(out.float(), torch.cat(exact), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for begin, end in ((0, 50), (20, 50), (50, 80)):
        options = {**arguments, "visible": bounds[begin:end]}
        assert torch.equal(prefill(q[begin:end], rows_of(cached, 0, end), [end - begin], options), out[begin:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(80, 576, 512), (3, 24, 16)])
def test_latent_attention(device: torch.device, dtype: torch.dtype, heads: int, dim: int, value_dim: int) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"kv_heads": 1, "dim": dim, "value_dim": value_dim}
    cached = cache([19, 2], dtype=dtype, device=device, latent=True, **sizes)
    q = torch.randn(4, heads, dim).to(device, dtype)
    out = prefill(q, cached, [3, 1], {"scale": 0.05})
    reference = expected(q, cached, [3, 1], AttentionParams(0.05))
    torch.testing.assert_close(out.float(), reference, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_tokens_outside_the_spans_are_not_written(device: torch.device) -> None:
    """A step's generated tokens come before its spans, padding after them."""
    torch.manual_seed(0)
    cached = cache([9, 30], dtype=torch.float32, device=device)
    q, target = torch.randn(20, 4, 32, device=device), torch.full((20, 4, 32), 7.0, device=device)
    prefill(q, cached, [4, 9], {"scale": 0.3, "out": target}, first=3)
    assert torch.equal(target[3:16], prefill(q[3:16].contiguous(), cached, [4, 9], {"scale": 0.3}))
    assert (target[:3] == 7).all()
    assert (target[16:] == 7).all()


def test_cross_attention(device: torch.device) -> None:
    """All queries attend to all positions; there may be more queries than positions."""
    torch.manual_seed(0)
    cached = cache([5, 70], dtype=torch.float32, device=device, kv_heads=4)
    q = torch.randn(12, 4, 32, device=device)
    out = prefill(q, cached, [8, 4], {"scale": 0.3, "causal": False})
    for row, part in enumerate((slice(0, 8), slice(8, 12))):
        k, v = (pages[:, cached.tables[row].long()].flatten(1, 2) for pages in (cached.keys, cached.values))
        length = int(cached.lengths[row])
        expected = F.scaled_dot_product_attention(q[part].transpose(0, 1), k[:, :length], v[:, :length], scale=0.3)
        torch.testing.assert_close(out[part], expected.transpose(0, 1), atol=2e-5, rtol=2e-5)


def test_the_ops_call_the_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "prefill_reference", None)
    torch.manual_seed(0)
    cached = cache([40, 20], dtype=torch.float32, device=device)
    q, starts = torch.randn(12, 4, 32, device=device), torch.tensor([0, 10, 12], device=device)
    attention = AttentionParams(0.3, softcap=2.0)
    with native.disabled():
        out = attend_spans(q, cached.keys, cached.values, cached.tables, cached.lengths, starts, attention)
        single = paged_prefill(q[:10], cached.keys, cached.values, cached.tables[0], 40, attention)
    assert torch.equal(out, prefill(q, cached, [10, 2], {"scale": 0.3, "softcap": 2.0}))
    assert torch.equal(single, out[:10])
