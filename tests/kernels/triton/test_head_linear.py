"""The Triton kernel of products of each head with its own weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import gpu, native
from quire.kernels.head_linear import GpuHeadWeight, pack_head_weight

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
POISON = -777.0


def check(
    rows: int, heads: int, size_in: int, size_out: int, gap: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Equal to the product in float64, nothing else is written, and rows alone have the same bits."""
    spread = torch.full((rows, heads + 1, size_in + gap), torch.nan, dtype=dtype, device=device)
    x = spread[:, :heads, gap:]
    x.copy_(torch.randn(rows, heads, size_in, device=device))
    weight = (torch.randn(heads, size_out, size_in, device=device) * size_in**-0.5).to(dtype)
    memory = torch.full((rows + 2, heads + 2, size_out + 2), POISON, dtype=dtype, device=device)
    out = memory[1:-1, 1:-1, 1:-1]
    packed = GpuHeadWeight(weight)
    assert packed(x, out=out) is out
    expected = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for row in range(0, rows, max(1, rows // 5)):
        assert torch.equal(packed(x[row : row + 1]), out[row : row + 1])
    out.fill_(POISON)
    assert (memory == POISON).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "heads", "size_in", "size_out"),
    [(0, 2, 16, 16), (1, 3, 128, 70), (17, 2, 40, 130), (3, 1, 512, 64), (70, 2, 33, 5), (5, 16, 24, 32)],
)
def test_a_product(
    device: torch.device, dtype: torch.dtype, rows: int, heads: int, size_in: int, size_out: int
) -> None:
    torch.manual_seed(0)
    check(rows, heads, size_in, size_out, 1, dtype, device)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(0, 40), heads=st.integers(1, 4), size_in=st.integers(1, 140), size_out=st.integers(1, 140),
    gap=st.integers(0, 3), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_of_any_size(
    rows: int, heads: int, size_in: int, size_out: int, gap: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        check(rows, heads, size_in, size_out, gap, dtype, torch.device("cuda"))
        return
    with gpu.interpreted(), np.errstate(all="ignore"):
        check(rows, heads, size_in, size_out, gap, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_nan_or_inf_change_no_others(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 3, 66, device=device).to(dtype)
    packed = GpuHeadWeight(torch.randn(3, 70, 66, device=device).to(dtype))
    plain = packed(x)
    x[7, 1, 65], x[9, 0, 0] = torch.nan, torch.inf
    out = packed(x)
    assert out[7, 1].isnan().all()
    assert not out[9, 0].isfinite().any()
    out[7, 1], out[9, 0] = plain[7, 1], plain[9, 0]
    assert torch.equal(out, plain)


@pytest.mark.skipif(gpu.is_interpreted(), reason="numpy's products, which the interpreter calls, depend on the shape")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size_in", "size_out"), [(128, 512), (512, 128)])
def test_a_row_does_not_depend_on_the_tile(
    device: torch.device, dtype: torch.dtype, size_in: int, size_out: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 16, size_in, device=device).to(dtype)
    packed = GpuHeadWeight(torch.randn(16, size_out, size_in, device=device).to(dtype))
    together = packed(x)
    for count in (1, 16, 17, 64, 65, 200):
        assert torch.equal(packed(x[-count:]), together[-count:])


def test_strides_and_which_weights_are_packed(device: torch.device) -> None:
    with native.disabled():
        for dtype in DTYPES:
            weight, x = torch.randn(2, 8, 64, device=device).to(dtype), torch.randn(3, 2, 64, device=device).to(dtype)
            packed = pack_head_weight(weight.mT.contiguous().mT)
            assert isinstance(packed, GpuHeadWeight)
            assert packed.nbytes == weight.nbytes
            assert torch.equal(packed(x.mT.contiguous().mT), GpuHeadWeight(weight)(x))
