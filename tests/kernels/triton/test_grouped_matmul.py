"""Triton kernels of experts and adapters: sorting of pairs, grouped products, sums over a token's experts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.engine.execution.cuda_graphs import CudaGraph
from quire.kernels import gpu
from quire.kernels.activation import reference as act_and_mul
from quire.kernels.experts import run_experts
from quire.kernels.gpu_weights import StackedWeights, WeightData, format_weight, prepare_rows
from quire.kernels.lora import add_lora, sort_rows
from quire.kernels.routing import softmax_top_k
from tests.support.triton_device import FakeGraph
from tests.support.variants import covering
from tests.support.weights import plain_rows, plain_weight


def check_sorted(choices: Tensor, experts: int) -> None:
    from quire.kernels.triton.grouped_matmul import sort_pairs

    order, totals = sort_pairs(choices, experts)
    counts = [int((choices == expert).sum()) for expert in range(experts)]
    assert totals.tolist() == counts
    expected = [int(i) for expert in range(experts) for i in (choices == expert).nonzero()]
    assert order[: len(expected)].tolist() == expected


@pytest.mark.parametrize(("pairs", "experts"), [(0, 4), (1, 1), (128, 5), (129, 60), (2500, 7)])
def test_pairs_are_sorted_by_expert(device: torch.device, pairs: int, experts: int) -> None:
    torch.manual_seed(0)
    check_sorted(torch.randint(-1, experts, (pairs,), device=device, dtype=torch.int32), experts)


@settings(max_examples=15, deadline=None)
@given(choices=st.lists(st.integers(-1, 4), max_size=300))
def test_any_pairs_are_sorted(choices: list[int]) -> None:
    if torch.cuda.is_available():
        check_sorted(torch.tensor(choices, dtype=torch.int64, device="cuda"), 5)
        return
    with gpu.interpreted():
        check_sorted(torch.tensor(choices, dtype=torch.int64), 5)


def stacked(weights: Tensor, quantization: str) -> StackedWeights:
    stack = StackedWeights(len(weights))
    for expert in reversed(range(len(weights))):  # checkpoints may have them in any order
        stack.put(expert, format_weight(weights[expert], quantization))
    return stack


def plain_product(x: Tensor, stack: StackedWeights, expert: int) -> Tensor:
    """x (1, size_in) times an expert's weight, both as they are quantized, in float64."""
    data = stack.data
    expert_data = WeightData(data.kind, data.values[expert], None if data.scales is None else data.scales[expert])
    rows = prepare_rows(x, expert_data)
    return plain_rows(rows) @ plain_weight(expert_data, x.shape[1]).T


def expected_sum(
    x: Tensor,
    gate_up: StackedWeights,
    down: StackedWeights,
    chosen: Tensor,
    weights: Tensor,
    biases: list[Tensor] | None,
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, experts in enumerate(chosen.tolist()):
        for rank, expert in enumerate(experts):
            if expert < 0:
                continue
            inner = plain_product(x[token : token + 1], gate_up, expert)
            inner = inner if biases is None else inner + biases[0][expert]
            inner = act_and_mul(inner.to(x.dtype), "silu")
            result = plain_product(inner, down, expert)
            result = result if biases is None else result + biases[1][expert]
            out[token] += result[0] * weights[token, rank]
    return out


@pytest.mark.parametrize(
    ("quantization", "dtype", "tokens"),
    covering(["none", "int8", "int4", "fp8", "fp8_blocks"], [torch.float32, torch.bfloat16], [1, 3, 40]),
)
def test_experts(device: torch.device, quantization: str, dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    experts, hidden, size, top_k = 5, 64, 64, 3
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    gate_up = stacked(torch.randn(experts, 2 * size, hidden, device=device).to(dtype) * 0.2, quantization)
    down = stacked(torch.randn(experts, hidden, size, device=device).to(dtype) * 0.2, quantization)
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(device, torch.int32)
    chosen[:, 1] = torch.where(torch.arange(tokens, device=device) % 3 == 2, -1, chosen[:, 1])
    weights = torch.rand(tokens, top_k, device=device)
    act = partial(act_and_mul, act="silu")
    out = run_experts(x, gate_up, down, act, chosen, weights)
    assert out.dtype == dtype
    expected = expected_sum(x, gate_up, down, chosen, weights, None)
    # the interpreter truncates to bfloat16; a last bit before an activation is quantized may change its row a little
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5 if quantization in ("none", "int4") else 1e-2
    assert (out - expected).norm() < tolerance * expected.norm()
    if quantization == "none":
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_experts_with_biases(device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 32, device=device)
    gate_up = stacked(torch.randn(3, 48, 32, device=device) * 0.2, "none")
    down = stacked(torch.randn(3, 32, 24, device=device) * 0.2, "none")
    biases = [torch.randn(3, 48, device=device), torch.randn(3, 32, device=device)]
    chosen, weights = torch.randint(0, 3, (6, 2), device=device), torch.rand(6, 2, device=device)
    act = partial(act_and_mul, act="silu")
    out = run_experts(x, gate_up, down, act, chosen, weights, gate_up_bias=biases[0], down_bias=biases[1])
    torch.testing.assert_close(
        out.double(), expected_sum(x, gate_up, down, chosen, weights, biases), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])
def test_a_token_does_not_depend_on_the_batch(device: torch.device, quantization: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 64, device=device).bfloat16()
    gate_up = stacked(torch.randn(4, 64, 64, device=device).bfloat16(), quantization)
    down = stacked(torch.randn(4, 64, 32, device=device).bfloat16(), quantization)
    chosen, weights = torch.randint(0, 4, (12, 2), device=device), torch.rand(12, 2, device=device)
    act = partial(act_and_mul, act="silu")
    together = run_experts(x, gate_up, down, act, chosen, weights)
    for begin, end in ((0, 1), (5, 8), (11, 12)):
        part = run_experts(x[begin:end], gate_up, down, act, chosen[begin:end], weights[begin:end])
        assert torch.equal(part, together[begin:end])


@pytest.mark.skipif(gpu.is_interpreted(), reason="the interpreter has no graphs")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_routing_and_experts_in_a_cuda_graph(device: torch.device, quantization: str) -> None:
    """A graph gives the same bits for other tokens, which choose other experts: nothing depends on the host."""
    torch.manual_seed(0)
    gate_up = stacked(torch.randn(16, 64, 128, device=device).bfloat16(), quantization)
    down = stacked(torch.randn(16, 128, 32, device=device).bfloat16(), quantization)
    x, logits = torch.randn(20, 128, device=device).bfloat16(), torch.randn(20, 16, device=device)

    def layer() -> Tensor:
        chosen, weights = softmax_top_k(logits, 4, renormalize=True)
        return run_experts(x, gate_up, down, partial(act_and_mul, act="silu"), chosen, weights)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(3):
        x.normal_()
        logits.normal_()
        graph.replay()
        assert torch.equal(out, layer())


def test_no_tokens(device: torch.device) -> None:
    stack = stacked(torch.randn(2, 16, 16, device=device), "none")
    empty = torch.empty(0, 16, device=device)
    chosen = torch.empty(0, 2, dtype=torch.int32, device=device)
    assert run_experts(empty, stack, stack, lambda x: x, chosen, chosen.float()).shape == (0, 16)


@pytest.mark.parametrize("rank", [8, 20])
@pytest.mark.parametrize(("rows", "size_in"), [(1, 64), (20, 1100), (70, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters(device: torch.device, rank: int, rows: int, size_in: int, dtype: torch.dtype) -> None:
    """Rows with any of several adapters; rows without one keep their bits."""

    torch.manual_seed(0)
    x, y = torch.randn(rows, size_in, device=device).to(dtype), torch.randn(rows, 90, device=device).to(dtype)
    down = torch.randn(3, rank, size_in, device=device).to(dtype) * size_in**-0.5
    up = torch.randn(3, 90, rank, device=device).to(dtype)
    adapters = torch.arange(rows, device=device, dtype=torch.int32) % 4 - 1
    expected = y.clone()
    for row, adapter in enumerate(adapters.tolist()):
        if adapter >= 0:
            inner = (x[row].double() @ down[adapter].double().T).to(dtype)
            expected[row] = (y[row].double() + inner.double() @ up[adapter].double().T).to(dtype)
    memory = torch.full((rows, 92), torch.nan, device=device, dtype=dtype)
    memory[:, 1:-1] = y
    out = add_lora(memory[:, 1:-1], x, down, up, sort_rows(adapters, 3))
    tolerance = 8e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(out[adapters < 0], y[adapters < 0])
    assert memory[:, [0, -1]].isnan().all()


def test_a_captured_product_serves_any_mix_of_adapters(device: torch.device) -> None:
    """A graph reads which row has which adapter when it is replayed."""
    torch.manual_seed(0)
    x, y = torch.randn(9, 64, device=device), torch.randn(9, 40, device=device)
    down, up = torch.randn(3, 8, 64, device=device), torch.randn(3, 40, 8, device=device)
    adapters, out = torch.full((9,), -1, dtype=torch.int32, device=device), torch.empty_like(y)

    def compute() -> None:
        add_lora(out.copy_(y), x, down, up, sort_rows(adapters, 3))

    graph = FakeGraph([]) if gpu.is_interpreted() else CudaGraph.sharing_memory()()
    graph.capture(compute)
    for mix in ([-1] * 9, [2] * 9, [0, -1, 1, 2, 2, -1, 0, 1, 1], [-1] * 8 + [1]):
        adapters.copy_(torch.tensor(mix, dtype=torch.int32))
        graph.replay()
        for row, adapter in enumerate(mix):
            expected = y[row] if adapter < 0 else y[row] + up[adapter] @ (down[adapter] @ x[row])
            torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-4)
