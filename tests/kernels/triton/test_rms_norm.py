"""The Triton kernel of the RMS norm against its torch reference."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (3, 33), (2, 5, 200), (0, 64)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_equals_its_reference(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], offset: float
) -> None:
    from quire.kernels.triton.rms_norm import rms_norm as triton_rms_norm

    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device).to(dtype)
    expected = rms_norm.reference(x, weight, 1e-6, offset)
    out = triton_rms_norm(x, weight, 1e-6, offset)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=2e-2 if dtype != torch.float32 else 1e-5)
