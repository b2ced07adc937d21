"""The Triton kernels of routers against their torch references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import routing


def in_order(chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of expert and weight by index of the expert."""
    order = chosen.long().argsort(-1)
    return chosen.long().gather(-1, order), weights.gather(-1, order)


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (6, 1), (128, 8), (60, 4), (3, 3)])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_softmax(device: torch.device, experts: int, top_k: int, renormalize: bool, tokens: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(tokens, experts, device=device) * 3
    expected = in_order(*routing.reference_softmax(logits, top_k, renormalize=renormalize))
    chosen, weights = routing.softmax_top_k(logits, top_k, renormalize=renormalize)
    assert (weights[:, :-1] >= weights[:, 1:]).all()
    chosen, weights = in_order(chosen, weights)
    assert torch.equal(chosen, expected[0])
    torch.testing.assert_close(weights, expected[1])


@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "top_k"), [(8, 4, 2, 2), (256, 8, 4, 8), (30, 3, 1, 5), (8, 1, 1, 3)]
)
@pytest.mark.parametrize("renormalize", [False, True])
def test_grouped_sigmoid(
    device: torch.device, experts: int, groups: int, top_groups: int, top_k: int, renormalize: bool
) -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(5, experts, device=device), torch.randn(experts, device=device) * 0.3
    options = {"groups": groups, "top_groups": top_groups, "scale": 2.5, "renormalize": renormalize}
    expected = in_order(*routing.reference_sigmoid(logits, bias, top_k, **options))  # type: ignore[arg-type]
    chosen, weights = in_order(*routing.grouped_sigmoid(logits, bias, top_k, **options))  # type: ignore[arg-type]
    assert torch.equal(chosen, expected[0])
    torch.testing.assert_close(weights, expected[1])


def test_equal_logits_and_logits_that_are_nan(device: torch.device) -> None:
    """Experts are distinct with equal logits, and exist even for a token whose logits are NaN."""
    logits = torch.zeros(2, 6, device=device)
    logits[1] = torch.nan
    chosen, _ = routing.softmax_top_k(logits, 3, renormalize=True)
    assert chosen[0].tolist() == [0, 1, 2]
    assert ((chosen >= 0) & (chosen < 6)).all()
