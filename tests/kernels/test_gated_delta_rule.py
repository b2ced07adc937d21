"""The gated delta rule: as the reference computes it, in any division of sequences among calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import gated_delta_rule, native, output_gate
from quire.kernels.delta_gates import DeltaGates

LENGTHS = (1, 37, 0, 2, 1)
SLOTS = torch.tensor([3, 0, 6, 1, 5])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def bounds(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0)


def inputs(
    tokens: int, key_heads: int, heads: int, key_dim: int, value_dim: int, channels: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor], DeltaGates]:
    """Queries, keys and values of a projection, and gates."""
    parts = [key_heads * key_dim, key_heads * key_dim, heads * value_dim, heads, heads * channels]
    projected = torch.randn(tokens, sum(parts)).to(dtype).split(parts, 1)
    counts = (key_heads, key_heads, heads)
    q, k, v = (part.unflatten(1, (count, -1)) for part, count in zip(projected[:3], counts, strict=True))
    rates, bias = torch.randn(heads), torch.randn(heads, channels)
    return (q, k, v), DeltaGates(projected[4].unflatten(1, (heads, channels)), projected[3], rates, bias, 2.0)


@DTYPES
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim"), [(2, 4, 24, 32), (1, 1, 128, 128), (3, 3, 5, 48), (2, 2, 7, 9)]
)
@pytest.mark.parametrize("of_channels", [False, True])
def test_gated_delta_rule(
    dtype: torch.dtype, key_heads: int, heads: int, key_dim: int, value_dim: int, of_channels: bool
) -> None:
    channels = key_dim if of_channels else 1
    parts, gates = inputs(sum(LENGTHS), key_heads, heads, key_dim, value_dim, channels, dtype)
    state = torch.randn(7, heads, key_dim, value_dim)
    expected_state = state.clone()
    out = gated_delta_rule.gated_delta_rule(*parts, gates, state, SLOTS, bounds(LENGTHS))
    expected = gated_delta_rule.reference(*parts, gates, expected_state, SLOTS, bounds(LENGTHS))
    assert out.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(state, expected_state, atol=1e-4, rtol=1e-4)
    assert torch.equal(state[[2, 4, 6]], expected_state[[2, 4, 6]]), "those of others, or of sequences without tokens"


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("channels", [1, 20])
def test_a_sequence_in_pieces_is_the_same(enabled: bool, channels: int) -> None:
    """Alone or beside another one."""
    parts, gates = inputs(60, 1, 2, 20, 32, channels, torch.float32)

    def pieces(*lengths: int, beside: int = 0) -> list[Tensor]:
        state = torch.zeros(2, 2, 20, 32)
        slots, results = torch.tensor([1, 0])[: 2 if beside else 1], list[Tensor]()
        for begin, length in zip(bounds(lengths).tolist(), lengths, strict=False):
            ends = torch.tensor([0, length, length + beside])[: len(slots) + 1]
            q, k, v, decay, beta = (
                torch.cat((part[begin : begin + length], part[:beside])) for part in (*parts, gates.decay, gates.beta)
            )
            some = DeltaGates(decay, beta, gates.log_rate, gates.bias, gates.most_beta)
            results.append(gated_delta_rule.gated_delta_rule(q, k, v, some, state, slots, ends)[:length])
        return [torch.cat(results), state[1]]

    with torch.inference_mode() if enabled else native.disabled():
        whole = pieces(60)
        for lengths, beside in (((1,) * 60, 0), ((33, 1, 2, 24), 5), ((3, 50, 7), 1)):
            for again, expected in zip(pieces(*lengths, beside=beside), whole, strict=True):
                assert torch.equal(again, expected)


@pytest.mark.skipif(native.instructions() is None, reason="without compiled kernels both are torch's")
@DTYPES
def test_output_gates(dtype: torch.dtype) -> None:
    projected, x = torch.randn(5, 2 * 3 * 32 + 2 * 32).to(dtype), torch.randn(5, 3, 32).to(dtype)
    heads = output_gate.without_gates(projected, 3, 32)
    gated = output_gate.sigmoid_gate(x, output_gate.gates_of(projected, 3, 32))
    with native.disabled():
        assert torch.equal(heads, output_gate.without_gates(projected, 3, 32))
        expected = output_gate.sigmoid_gate(x, output_gate.gates_of(projected, 3, 32))
    torch.testing.assert_close(gated, expected, atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 1e-2)
