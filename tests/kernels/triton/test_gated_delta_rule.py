"""The Triton kernel of the gated delta rule against its torch reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.kernels import gated_delta_rule, native
from quire.kernels.delta_gates import DeltaGates


@pytest.fixture(autouse=True)
def _without_compiled_kernels(device: torch.device) -> Iterator[None]:
    with native.disabled():
        yield


@pytest.mark.parametrize(("dtype", "channels"), [(torch.float32, 24), (torch.bfloat16, 1)])
def test_gated_delta_rule(device: torch.device, dtype: torch.dtype, channels: int) -> None:
    q, k = (torch.randn(8, 2, 24, device=device).to(dtype) for _ in range(2))
    v = torch.randn(8, 4, 20, device=device).to(dtype)
    decay, beta = torch.randn(8, 4, channels, device=device).to(dtype), torch.randn(8, 4, device=device).to(dtype)
    gates = DeltaGates(
        decay, beta, torch.randn(4, device=device), torch.randn(4, channels, device=device), most_beta=2.0
    )
    state = torch.randn(4, 4, 24, 20, device=device)
    expected_state, slots, bounds = (
        state.clone(),
        torch.tensor([2, 0, 3], device=device),
        torch.tensor([0, 1, 8, 8]),
    )
    out = gated_delta_rule.gated_delta_rule(q, k, v, gates, state, slots, bounds)
    expected = gated_delta_rule.reference(q, k, v, gates, expected_state, slots, bounds)
    torch.testing.assert_close(out, expected, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=1e-2)
    torch.testing.assert_close(state, expected_state, atol=1e-4, rtol=1e-4)
