"""The Triton kernel that quantizes rows, against its torch reference."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import quantize
from quire.kernels.quantize import quantize_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (2, 256), (5, 300), (0, 64)])
def test_quantized_rows_equal_the_reference(
    device: torch.device, dtype: torch.dtype, to: torch.dtype, group: int | None, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape, device=device) * 3).to(dtype)
    if len(x) > 2:
        x[1] = 0.0
    expected, expected_scales = quantize.reference(x, to, group)
    values, scales = quantize_rows(x, to, group)
    assert values.dtype == to
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0.0)
    assert torch.equal(values.float(), expected.float())


@pytest.mark.parametrize("to", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_no_scale(device: torch.device, to: torch.dtype, odd: float) -> None:
    x = torch.randn(3, 200, device=device)
    x[1, 150] = odd
    _, scales = quantize_rows(x, to)
    assert scales[1].isnan().all()
    assert scales[[0, 2]].isfinite().all()
    _, scales = quantize_rows(x, to, 128)
    assert scales.isnan().tolist() == [[False, False], [False, True], [False, False]]


def test_rows_with_a_stride(device: torch.device) -> None:
    x = torch.randn(4, 300, device=device)[:, 50:150]
    values, scales = quantize_rows(x, torch.int8)
    expected, expected_scales = quantize_rows(x.contiguous(), torch.int8)
    assert torch.equal(values, expected)
    assert torch.equal(scales, expected_scales)
