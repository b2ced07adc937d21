"""The recurrences of state-space models: as the references compute them, in any division of sequences among calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import gated_rms_norm, linear_recurrence, native, selective_scan, state_space_scan
from quire.kernels.state_parameters import ChannelParameters, HeadParameters

LENGTHS = (1, 37, 0, 2, 1)
SLOTS = torch.tensor([3, 0, 6, 1, 5])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def bounds(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0)


def head_inputs(tokens: int, heads: int, dim: int, groups: int, size: int) -> tuple[Any, HeadParameters]:
    """x, dt, b and c of a projection, and parameters."""
    parts = [heads * dim, heads, groups * size, groups * size]
    x, dt, b, c = torch.randn(tokens, sum(parts)).split(parts, 1)
    parameters = HeadParameters(torch.randn(heads) * 2, torch.randn(heads), torch.randn(heads), 0.01, 2.0)
    grouped = [part.unflatten(1, (groups, size)) for part in (b, c)]
    return [x.unflatten(1, (heads, dim)), dt * 8, *grouped], parameters


def channel_inputs(tokens: int, channels: int, size: int) -> tuple[Any, ChannelParameters]:
    """x, dt, b and c, and parameters."""
    parts = [channels, channels, size, size]
    x, dt, b, c = torch.randn(tokens, sum(parts)).split(parts, 1)
    parameters = ChannelParameters(torch.randn(size, channels) * 2, torch.randn(channels), torch.randn(channels))
    return [x, dt * 8, b, c], parameters


def tolerances(dtype: torch.dtype) -> Any:
    return {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}


@DTYPES
@pytest.mark.parametrize(
    ("heads", "dim", "groups", "size"), [(4, 32, 2, 24), (2, 16, 1, 128), (6, 64, 3, 16), (3, 48, 3, 5), (2, 8, 1, 4)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_state_space_scan(dtype: torch.dtype, heads: int, dim: int, groups: int, size: int, gated: bool) -> None:
    inputs, parameters = head_inputs(sum(LENGTHS), heads, dim, groups, size)
    x, dt, b, c = (part.to(dtype) for part in inputs)
    gate = torch.randn_like(x) if gated else None
    state = torch.randn(7, heads, size, dim)
    expected_state = state.clone()
    out = state_space_scan.state_space_scan(x, dt, b, c, parameters, state, SLOTS, bounds(LENGTHS), gate=gate)
    expected = state_space_scan.reference(x, dt, b, c, parameters, expected_state, SLOTS, bounds(LENGTHS), gate)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, **tolerances(dtype))
    torch.testing.assert_close(state, expected_state, atol=1e-4, rtol=1e-4)
    assert torch.equal(state[[2, 4, 6]], expected_state[[2, 4, 6]]), "those of others, or of sequences without tokens"


@DTYPES
@pytest.mark.parametrize(("channels", "size"), [(64, 16), (16, 5), (24, 16)])
@pytest.mark.parametrize("gated", [False, True])
def test_selective_scan(dtype: torch.dtype, channels: int, size: int, gated: bool) -> None:
    inputs, parameters = channel_inputs(sum(LENGTHS), channels, size)
    x, dt, b, c = (part.to(dtype) for part in inputs)
    gate = torch.randn_like(x) if gated else None
    state = torch.randn(7, size, channels)
    expected_state = state.clone()
    out = selective_scan.selective_scan(x, dt, b, c, parameters, state, SLOTS, bounds(LENGTHS), gate=gate)
    expected = selective_scan.reference(x, dt, b, c, parameters, expected_state, SLOTS, bounds(LENGTHS), gate)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, **tolerances(dtype))
    torch.testing.assert_close(state, expected_state, atol=1e-4, rtol=1e-4)
    assert torch.equal(state[[2, 4, 6]], expected_state[[2, 4, 6]])


@DTYPES
@pytest.mark.parametrize(("channels", "block"), [(96, 48), (32, 16), (24, 8)])
def test_gated_linear_recurrence(dtype: torch.dtype, channels: int, block: int) -> None:
    """Some sequences begin, and decays are near 1 as well as near 0."""
    tokens = sum(LENGTHS)
    x, gates = torch.randn(tokens, 2 * channels).to(dtype)[:, channels:], 3 * torch.randn(tokens, 2 * channels)
    rate, state = torch.logspace(-3, 1, channels), torch.randn(7, channels)
    positions = torch.cat(
        [torch.arange(begin, begin + length) for begin, length in zip((4, 0, 0, 0, 9), LENGTHS, strict=True)]
    )
    arguments = gates, rate, positions
    expected_state, divided_state = state.clone(), state.clone()
    out = linear_recurrence.gated_linear_recurrence(x, *arguments, state, SLOTS, bounds(LENGTHS), block)
    expected = linear_recurrence.reference(x, *arguments, expected_state, SLOTS, bounds(LENGTHS), block)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, **tolerances(dtype))
    torch.testing.assert_close(state, expected_state, atol=1e-3, rtol=1e-3)
    assert torch.equal(state[[2, 4, 6]], expected_state[[2, 4, 6]])
    parts = []
    for begin, end in ((0, 11), (11, tokens)):  # the second sequence is divided
        each = slice(begin, end)
        ends = bounds(LENGTHS).clamp(begin, end) - begin
        parts.append(
            linear_recurrence.gated_linear_recurrence(
                x[each], gates[each], rate, positions[each], divided_state, SLOTS, ends, block
            )
        )
    assert torch.equal(torch.cat(parts), out)
    assert torch.equal(divided_state, state)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_sequence_in_pieces_is_the_same(enabled: bool) -> None:
    """Alone or beside another one."""
    heads, head_parameters = head_inputs(60, 2, 32, 1, 20)
    channels, channel_parameters = channel_inputs(60, 32, 16)

    def pieces(*lengths: int, beside: int = 0) -> list[Tensor]:
        states = torch.zeros(2, 2, 20, 32), torch.zeros(2, 16, 32)
        slots, results = torch.tensor([1, 0])[: 2 if beside else 1], list[Tensor]()
        for begin, length in zip(bounds(lengths).tolist(), lengths, strict=False):
            ends = torch.tensor([0, length, length + beside])[: len(slots) + 1]
            x, dt, b, c = (torch.cat((part[begin : begin + length], part[:beside])) for part in heads)
            y = state_space_scan.state_space_scan(x, dt, b, c, head_parameters, states[0], slots, ends)
            x, dt, b, c = (torch.cat((part[begin : begin + length], part[:beside])) for part in channels)
            z = selective_scan.selective_scan(x, dt, b, c, channel_parameters, states[1], slots, ends)
            results.append(torch.cat((y.flatten(1), z), 1)[:length])
        return [torch.cat(results), *(state[1] for state in states)]

    with torch.inference_mode() if enabled else native.disabled():
        whole = pieces(60)
        for lengths, beside in (((1,) * 60, 0), ((33, 1, 2, 24), 5), ((3, 50, 7), 1)):
            for again, expected in zip(pieces(*lengths, beside=beside), whole, strict=True):
                assert torch.equal(again, expected)


@DTYPES
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize(("dim", "group"), [(64, 64), (96, 32), (40, 20)])
def test_gated_rms_norm(dtype: torch.dtype, gate_first: bool, dim: int, group: int) -> None:
    x, gate = torch.randn(5, 2 * dim).to(dtype).split(dim, 1)
    weight = torch.randn(dim).to(dtype)
    out = gated_rms_norm.gated_rms_norm(x, gate, weight, group, 1e-5, gate_first=gate_first)
    expected = gated_rms_norm.reference(x, gate, weight, group, 1e-5, gate_first=gate_first)
    torch.testing.assert_close(out, expected, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=1e-2)


@pytest.mark.skipif(native.instructions() is None, reason="only compiled kernels have their own softplus")
def test_steps_are_exact_where_they_are_small_or_large() -> None:
    """The state after one token of a channel with b = x = 1 is its step."""
    dt = torch.cat((torch.linspace(-80, 80, 2000), torch.logspace(-6, 0, 48)))[None]
    count = dt.shape[1]
    state, zeros = torch.zeros(1, 1, count), torch.zeros(count)
    parameters = ChannelParameters(torch.ones(1, count), zeros, zeros)
    one = torch.ones(1, 1)
    selective_scan.selective_scan(
        torch.ones(1, count), dt, one, one, parameters, state, torch.tensor([0]), torch.tensor([0, 1])
    )
    expected = torch.nn.functional.softplus(dt.double(), threshold=100).float()
    torch.testing.assert_close(state[0], expected, atol=0, rtol=1.5e-6)
