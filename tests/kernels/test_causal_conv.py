"""The convolution over time: as a sum over taps, in any division of sequences among calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import causal_conv as module
from quire.kernels import native
from quire.kernels.causal_conv import causal_conv

LENGTHS = (1, 70, 0, 2, 5, 1)


def bounds(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "width"), [(16, 2), (40, 3), (64, 4), (83, 8), (5, 4)])
@pytest.mark.parametrize("gated", [False, True])
def test_it_is_the_convolution_of_the_reference(dtype: torch.dtype, channels: int, width: int, gated: bool) -> None:
    tokens = sum(LENGTHS)
    projected = torch.randn(tokens, 3 * channels).to(dtype)
    x, first, second = projected.chunk(3, 1)
    weight, bias = torch.randn(channels, width).to(dtype), None if gated else torch.randn(channels).to(dtype)
    state = torch.randn(9, width - 1, channels).to(dtype).float()
    slots, expected_state = torch.tensor([3, 0, 8, 1, 7, 5]), state.clone()
    gates = (first, second) if gated else (None, None)
    activation: Any = None if gated else "silu"
    arguments = (weight, bias, state, slots, bounds(LENGTHS))
    out = causal_conv(x, *arguments, activation=activation, input_gate=gates[0], output_gate=gates[1])
    arguments = (weight, bias, expected_state, slots, bounds(LENGTHS))
    inputs = x * first if gated else x
    expected = module.reference(inputs, *arguments, gates[1], silu=not gated)
    atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (1e-2, 1e-2)
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)
    assert out.dtype == dtype
    assert torch.equal(state, expected_state), "states are inputs, and those of other slots do not change"


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("channels", [64, 83])
def test_a_sequence_in_pieces_is_the_same(enabled: bool, channels: int) -> None:
    x, weight, bias = torch.randn(80, channels), torch.randn(channels, 4), torch.randn(channels)

    def pieces(*lengths: int) -> tuple[Tensor, Tensor]:
        state, results = torch.zeros(2, 3, channels), list[Tensor]()
        for begin, length in zip(bounds(lengths).tolist(), lengths, strict=False):
            part = x[begin : begin + length]
            arguments = (weight, bias, state, torch.tensor([1, 0]), torch.tensor([0, length, 2 * length]))
            results.append(causal_conv(torch.cat((part, -part)), *arguments, activation="silu")[:length])
        return torch.cat(results), state

    context = native.disabled() if not enabled else torch.inference_mode()
    with context:
        whole, state = pieces(80)
        for lengths in ((1,) * 80, (33, 1, 2, 44), (3, 70, 7)):
            again, state_again = pieces(*lengths)
            assert torch.equal(again, whole)
            assert torch.equal(state_again, state)


@pytest.mark.skipif(native.instructions() is None, reason="only compiled kernels check their arguments")
def test_wrong_slots_and_bounds_are_refused() -> None:
    x, weight, state = torch.randn(4, 16), torch.randn(16, 3), torch.zeros(2, 2, 16)
    good = torch.tensor([1]), torch.tensor([0, 4])
    causal_conv(x, weight, None, state, *good)
    for slots, sequence_bounds, message in (
        ([2], [0, 4], "slots: indices of states"),
        ([-1], [0, 4], "slots: indices of states"),
        ([0], [0, 3], "cu_seqlens: bounds from 0 to the number of tokens"),
        ([0, 1], [0, 5, 4], "cu_seqlens: bounds that do not fall"),
        ([0, 1], [0, 4], "cu_seqlens: one bound more"),
    ):
        with pytest.raises(ValueError, match=message):
            causal_conv(x, weight, None, state, torch.tensor(slots), torch.tensor(sequence_bounds))
