"""Products of each head with its own weight, by the compiled kernel and in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import CapturedCalls, Workspace
from quire.kernels.head_linear import PackedHeadWeight, pack_head_weight, reference

compiled = pytest.mark.skipif(native.instructions() is None, reason="installed without a compiler")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
POISON = -777.0


def inputs(
    rows: int, heads: int, size_in: int, size_out: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads, size_in, generator=generator).to(dtype)
    weight = torch.randn(heads, size_out, size_in, generator=generator) * size_in**-0.5
    return x, weight.to(dtype)


def assert_product(out: Tensor, x: Tensor, weight: Tensor) -> None:
    expected = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@compiled
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 70), heads=st.integers(1, 5), size_in=st.integers(1, 70), size_out=st.integers(1, 100),
    gap=st.integers(0, 3), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_of_any_size(
    rows: int, heads: int, size_in: int, size_out: int, gap: int, dtype: torch.dtype, seed: int
) -> None:
    """Rows and heads with gaps between them; nothing else is written; each row alone has the same bits."""
    x, weight = inputs(rows, heads, size_in, size_out, dtype, seed)
    spread = torch.full((rows, heads + 1, size_in + gap), torch.nan, dtype=dtype)
    spread[:, :heads, gap:] = x
    memory = torch.full((rows + 2, heads + 2, size_out + 2), POISON, dtype=dtype)
    out = memory[1:-1, 1:-1, 1:-1]
    packed = PackedHeadWeight(weight)
    packed(spread[:, :heads, gap:], out=out)
    assert_product(out, x, weight)
    for row in range(rows):
        assert torch.equal(packed(x[row : row + 1]), out[row : row + 1])
    out.fill_(POISON)
    assert (memory == POISON).all()


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size_in", "size_out"), [(16, 128, 512), (16, 512, 128), (3, 2048, 40)])
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype, heads: int, size_in: int, size_out: int) -> None:
    """Of rows as wide as a page of memory, too, which are copied where there are several."""
    x, weight = inputs(389, heads, size_in, size_out, dtype)
    packed = PackedHeadWeight(weight)
    together = packed(x)
    assert_product(together, x, weight)
    for first, count in ((0, 1), (388, 1), (3, 11), (20, 12), (140, 13), (250, 64), (10, 65)):
        assert torch.equal(packed(x[first : first + count]), together[first : first + count])


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_nan_or_inf_change_no_others(dtype: torch.dtype) -> None:
    x, weight = inputs(30, 3, 66, 70, dtype)
    packed = PackedHeadWeight(weight)
    plain = packed(x)
    x[7, 1, 65], x[9, 0, 0] = torch.nan, torch.inf
    out = packed(x)
    assert out[7, 1].isnan().all()
    assert not out[9, 0].isfinite().any()
    out[7, 1], out[9, 0] = plain[7, 1], plain[9, 0]
    assert torch.equal(out, plain)


@compiled
def test_a_replay_computes_other_numbers_of_rows() -> None:
    x, weight = inputs(40, 2, 32, 48, torch.bfloat16)
    packed, memory = PackedHeadWeight(weight), x.clone()
    out = torch.zeros(40, 2, 48, dtype=torch.bfloat16)
    calls = CapturedCalls(lambda: packed(memory[:3], out=out[:3]), Workspace(40), (3, 3))
    assert calls.complete
    expected = packed(x)
    calls.replay((40, 40))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_the_reference_in_torch(dtype: torch.dtype) -> None:
    """What runs where there are no kernels."""
    x, weight = inputs(5, 3, 20, 30, torch.float32)
    x, weight = x.to(dtype), weight.to(dtype)
    with native.disabled():
        assert pack_head_weight(weight) is None
    out = torch.full((5, 3, 32), POISON, dtype=dtype)
    assert torch.equal(reference(x, weight, out=out[..., 1:-1]), reference(x, weight))
    assert (out[..., [0, -1]] == POISON).all()
    expected = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    torch.testing.assert_close(out[..., 1:-1].double(), expected, rtol=2e-2, atol=2e-2)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_transposed_weight_is_packed(dtype: torch.dtype) -> None:
    x, weight = inputs(4, 3, 20, 30, dtype)
    packed, other = pack_head_weight(weight), pack_head_weight(weight.mT.contiguous().mT)
    assert packed is not None
    assert other is not None
    assert torch.equal(packed(x), other(x))
    assert torch.equal(packed(x.mT.contiguous().mT), other(x))
    assert packed.nbytes == weight.nbytes // 30 * 32
    assert pack_head_weight(weight.half()) is None
