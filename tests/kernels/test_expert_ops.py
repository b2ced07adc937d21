"""Compiled routers and experts against their definitions in torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import native
from quire.kernels.activation import act_and_mul, activation, clamped_swiglu
from quire.kernels.expert_calls import ExpertCalls, ExpertMemory
from quire.kernels.linear import PackedBFloat16
from quire.kernels.multiply import gate_rows, multiply, multiply_rows, scale_in_place
from quire.kernels.routing import biased_softmax, grouped_sigmoid, sigmoid_top_k, softmax_top_k

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="there are no compiled kernels")

HIDDEN, SIZE, EXPERTS = 64, 48, 7
ROUTERS: dict[str, Any] = {
    "softmax": partial(softmax_top_k, top_k=3, renormalize=False),
    "softmax, sum 1": partial(softmax_top_k, top_k=3, renormalize=True, scale=2.5),
    "softmax, groups": partial(softmax_top_k, top_k=4, renormalize=True, groups=6, top_groups=2),
    "softmax, factors of experts": partial(
        softmax_top_k, top_k=3, renormalize=True, expert_scale=torch.linspace(0.5, 2.0, 36)
    ),
    "softmax and bias": partial(
        biased_softmax, top_k=5, bias=torch.linspace(-0.03, 0.03, 36), least_sum=0.3, scale=1.5
    ),
    "sigmoids": partial(sigmoid_top_k, top_k=2),
    "sigmoids, groups": partial(
        grouped_sigmoid,
        top_k=6,
        bias=torch.linspace(-0.2, 0.2, 36),
        groups=6,
        top_groups=3,
        scale=2.5,
        renormalize=True,
    ),
}


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("router", ROUTERS)
def test_compiled_routers_choose_what_torch_does(router: str, tokens: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(tokens, 36) * 2
    chosen, weights = ROUTERS[router](logits)
    with native.disabled():
        expected, expected_weights = ROUTERS[router](logits)
    order, expected_order = chosen.argsort(1), expected.argsort(1)
    assert torch.equal(chosen.gather(1, order), expected.gather(1, expected_order))
    torch.testing.assert_close(weights.gather(1, order), expected_weights.gather(1, expected_order))


def test_logits_that_are_no_numbers_choose_some_experts() -> None:
    """What follows computes NaN, which ends the request."""
    logits = torch.full((2, 36), torch.nan)
    for route in ROUTERS.values():
        chosen, weights = route(logits)
        assert ((chosen >= 0) & (chosen < 36)).all()
        assert len({*chosen[0].tolist()}) == chosen.shape[1]
        assert weights.isnan().all()


class SmallExperts:
    """Gated feed-forwards in bfloat16."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(1)
        self._weights = [
            (PackedBFloat16((torch.randn(2 * SIZE, HIDDEN) / 8).bfloat16()), PackedBFloat16(down))
            for down in (torch.randn(count, HIDDEN, SIZE) / 8).bfloat16()
        ]
        self.functions = [partial(self.compute, index) for index in range(count)]

    def compute(self, index: int, x: Tensor, out: Tensor | None = None) -> Tensor:
        gate_up, down = self._weights[index]
        return down(act_and_mul(gate_up(x, None), "silu"), None, out=out)

    def weighted_sum(self, x: Tensor, chosen: Tensor, weights: Tensor, *, first: int, weighs_inputs: bool) -> Tensor:
        out = torch.zeros_like(x)
        for index in range(len(self.functions)):
            tokens, rank = (chosen == first + index).nonzero(as_tuple=True)
            if len(tokens):
                factors = weights[tokens, rank, None].bfloat16()
                read = x[tokens] * factors if weighs_inputs else x[tokens]
                result = self.compute(index, read)
                out.index_add_(0, tokens, result if weighs_inputs else result * factors)
        return out


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("weighs_inputs", [False, True])
def test_captured_experts_have_the_bits_of_each_alone(first: int, weighs_inputs: bool) -> None:
    """For more tokens than an expert computes at a time, and where a rank has some of the experts."""
    experts, memory = SmallExperts(EXPERTS), ExpertMemory(HIDDEN)
    calls = ExpertCalls.capture(experts.functions, memory, torch.bfloat16, first)
    assert calls is not None
    for tokens in (1, 5, 1300):
        x, logits = torch.randn(tokens, HIDDEN).bfloat16(), torch.randn(tokens, EXPERTS + first)
        logits[:, 3] += 3.0  # nearly all tokens choose this one
        weights, chosen = logits.softmax(-1).topk(2, -1)
        out = calls.run(x, chosen, weights, weighs_inputs=weighs_inputs)
        expected = experts.weighted_sum(x, chosen, weights, first=first, weighs_inputs=weighs_inputs)
        assert torch.equal(out, expected)


def test_experts_that_compute_with_torch_are_not_captured() -> None:
    def compute(x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(x * 2)

    assert ExpertCalls.capture([compute], ExpertMemory(HIDDEN), torch.bfloat16, 0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 37])
def test_products(dim: int, dtype: torch.dtype) -> None:
    """With a part of other rows, a number for each column, for each row, and one for all."""
    torch.manual_seed(0)
    x, wide = torch.randn(40, dim).to(dtype), torch.randn(40, 3 * dim).to(dtype)
    part, columns, rows = wide[:, dim : 2 * dim], torch.randn(dim), torch.randn(40, 1)
    assert torch.equal(multiply(x, part), x * part)
    assert torch.equal(multiply(x, columns), (x * columns).to(dtype))
    torch.testing.assert_close(gate_rows(x, rows), x * rows.sigmoid().to(dtype))
    expected = wide.clone()
    expected[:, dim : 2 * dim] *= rows.to(dtype)
    multiply_rows(part, rows)
    assert torch.equal(wide, expected)
    expected[:, dim : 2 * dim] *= 0.3
    scale_in_place(part, 0.3)
    assert torch.equal(wide, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_swiglu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(30, 96) * 8).to(dtype)
    gate, up = gate_up.float().chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(dtype)
    torch.testing.assert_close(clamped_swiglu(gate_up, 1.702, 7.0), expected)
    plain = F.relu(gate_up.float()).square().to(dtype)
    assert torch.equal(activation(gate_up, "relu2"), plain)
