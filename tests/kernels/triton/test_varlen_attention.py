"""The Triton kernel of encoders' attention against its torch reference."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kernels import native, varlen_attention
from quire.kernels.varlen_attention import EncoderAttentionParams
from tests.kernels.triton.cached import TOLERANCE

FEW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FEW
@given(
    counts=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    dim=st.sampled_from([16, 20, 64, 80]),
    dtype=st.sampled_from(list(TOLERANCE)),
    window=st.sampled_from([None, 0, 7]),
    softcap=st.sampled_from([None, 2.0]),
    alibi=st.booleans(),
    bias=st.booleans(),
    causal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_varlen_attention_equals_its_reference(
    device: torch.device,
    counts: list[int],
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    alibi: bool,
    bias: bool,
    causal: bool,
    seed: int,
) -> None:
    """And each sequence has the same bits alone. Queries, keys and values are parts of one projection."""
    torch.manual_seed(seed)
    query_heads, kv_heads = heads
    rows = torch.randn(sum(counts), query_heads + 2 * kv_heads, dim, device=device).to(dtype)
    q, k, v = rows.split([query_heads, kv_heads, kv_heads], 1)
    ends = list(accumulate(counts, initial=0))
    params = EncoderAttentionParams(
        0.3,
        window,
        softcap,
        torch.rand(query_heads, device=device) if alibi else None,
        torch.randn(query_heads, 11, device=device) if bias else None,
        causal,
    )
    with native.disabled():
        out = varlen_attention.varlen_attention(q, k, v, torch.tensor(ends, device=device), params)
        expected = varlen_attention.reference(q.float(), k.float(), v.float(), torch.tensor(ends), params)
        torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        for begin, end in pairwise(ends):
            span, ends_of_one = slice(begin, end), torch.tensor([0, end - begin], device=device)
            single = varlen_attention.varlen_attention(q[span], k[span], v[span], ends_of_one, params)
            assert torch.equal(single, out[begin:end])


def test_the_op_calls_the_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "reference", None)
    q = torch.randn(5, 2, 16, device=device)
    with native.disabled():
        out = varlen_attention.varlen_attention(
            q, q, q, torch.tensor([0, 2, 5, 5], device=device), EncoderAttentionParams(0.3)
        )
    assert out.isfinite().all()
