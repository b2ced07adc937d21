"""The Triton kernels of layers with states against their torch references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.kernels import causal_conv, gated_rms_norm, native, selective_scan, state_space_scan
from quire.kernels.state_parameters import ChannelParameters, HeadParameters

SLOTS, BOUNDS = [2, 0, 3], [0, 1, 8, 8]


@pytest.fixture(autouse=True)
def _without_compiled_kernels(device: torch.device) -> Iterator[None]:
    with native.disabled():
        yield


@pytest.mark.parametrize(("dtype", "gated"), [(torch.float32, False), (torch.bfloat16, True)])
def test_causal_conv(device: torch.device, dtype: torch.dtype, gated: bool) -> None:
    x, gate = torch.randn(8, 150, device=device).to(dtype), torch.randn(8, 150, device=device).to(dtype)
    weight, bias = torch.randn(150, 4, device=device).to(dtype), torch.randn(150, device=device).to(dtype)
    state = torch.randn(4, 3, 150, device=device)
    expected_state, slots, bounds = state.clone(), torch.tensor(SLOTS, device=device), torch.tensor(BOUNDS)
    out = causal_conv.causal_conv(
        x,
        weight,
        None if gated else bias,
        state,
        slots,
        bounds,
        activation=None if gated else "silu",
        output_gate=gate if gated else None,
    )
    expected = causal_conv.reference(
        x, weight, None if gated else bias, expected_state, slots, bounds, gate if gated else None, silu=not gated
    )
    torch.testing.assert_close(out, expected, atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=1e-2)
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize(("dtype", "gated"), [(torch.float32, False), (torch.bfloat16, True)])
def test_state_space_scan(device: torch.device, dtype: torch.dtype, gated: bool) -> None:
    x, dt = torch.randn(8, 4, 20, device=device).to(dtype), torch.randn(8, 4, device=device).to(dtype)
    b, c = (torch.randn(8, 2, 24, device=device).to(dtype) for _ in range(2))
    rate, bias, skip = (torch.randn(4, device=device) for _ in range(3))
    parameters = HeadParameters(rate, bias, skip, 0.1, 2.0)
    gate = torch.randn_like(x) if gated else None
    state = torch.randn(4, 4, 24, 20, device=device)
    expected_state, slots, bounds = state.clone(), torch.tensor(SLOTS, device=device), torch.tensor(BOUNDS)
    out = state_space_scan.state_space_scan(x, dt, b, c, parameters, state, slots, bounds, gate=gate)
    expected = state_space_scan.reference(x, dt, b, c, parameters, expected_state, slots, bounds, gate)
    torch.testing.assert_close(out, expected, atol=1e-4 if dtype == torch.float32 else 5e-2, rtol=1e-2)
    torch.testing.assert_close(state, expected_state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "gated"), [(torch.float32, False), (torch.bfloat16, True)])
def test_selective_scan(device: torch.device, dtype: torch.dtype, gated: bool) -> None:
    x, dt, gates = (torch.randn(8, 70, device=device).to(dtype) for _ in range(3))
    b, c = (torch.randn(8, 5, device=device).to(dtype) for _ in range(2))
    rate, bias, skip = (
        torch.randn(5, 70, device=device),
        torch.randn(70, device=device),
        torch.randn(70, device=device),
    )
    parameters, gate = ChannelParameters(rate, bias, skip), gates if gated else None
    state = torch.randn(4, 5, 70, device=device)
    expected_state, slots, bounds = state.clone(), torch.tensor(SLOTS, device=device), torch.tensor(BOUNDS)
    out = selective_scan.selective_scan(x, dt, b, c, parameters, state, slots, bounds, gate=gate)
    expected = selective_scan.reference(x, dt, b, c, parameters, expected_state, slots, bounds, gate)
    torch.testing.assert_close(out, expected, atol=1e-4 if dtype == torch.float32 else 5e-2, rtol=1e-2)
    torch.testing.assert_close(state, expected_state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "gate_first"), [(torch.float32, False), (torch.bfloat16, True)])
def test_gated_rms_norm(device: torch.device, dtype: torch.dtype, gate_first: bool) -> None:
    x, gate = torch.randn(3, 144, device=device).to(dtype).split(72, 1)
    weight = torch.randn(72, device=device).to(dtype)
    out = gated_rms_norm.gated_rms_norm(x, gate, weight, 24, 1e-5, gate_first=gate_first)
    expected = gated_rms_norm.reference(x, gate, weight, 24, 1e-5, gate_first=gate_first)
    atol, rtol = (1e-5, 1e-2) if dtype == torch.float32 else (3e-2, 2e-2)  # what is rounded twice differs by 1/64
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)
