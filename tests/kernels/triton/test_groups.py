"""The Triton kernels of weights in groups: products, rows, and experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.activation import reference as act_and_mul
from quire.kernels.experts import run_experts
from quire.kernels.gpu_groups import GpuWeightParts, GroupedGpuWeight, format_groups
from quire.kernels.gpu_weights import PlainGpuWeight, StackedWeights, WeightData
from quire.kernels.grouped import can_pack_groups, pack_groups
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.linear import PackedTable, PackedWeight
from tests.support.groups import make_groups
from tests.support.variants import slow_but

# Format, inputs of a group (None: all), inputs.
SHAPES: list[tuple[str, int | None, int]] = [
    ("affine", 16, 48),
    ("affine", 32, 1056),
    ("affine", 128, 1152),
    ("affine", None, 70),
    ("affine", 48, 96),
    ("symmetric", 64, 320),
    ("symmetric", 128, 1024),
    ("Q4_K", 32, 576),
    ("nf4", 64, 192),
    ("e2m1", 16, 144),
    ("e2m1", 32, 1024),
    ("int8", 16, 112),
    ("int8", 32, 64),
    ("int8", None, 75),
    ("int8 affine", 128, 1152),
]
_QUICK = [SHAPES[index] for index in (0, 1, 3, 6, 8, 9, 11, 14)]


def packed(device: torch.device, *parts: GroupedWeight, dtype: torch.dtype = torch.float16) -> PackedWeight:
    with native.disabled():
        weight = pack_groups(parts, dtype, device)
    assert weight is not None
    return weight


def rounded(weight: GroupedWeight) -> GroupedWeight:
    """A weight whose scales and minimums are float16 times a power of two for each output."""
    levels = [level for level in (weight.scales, weight.minimums) if level is not None]
    largest = torch.stack([level.abs().amax(1, keepdim=True) for level in levels]).amax(0)
    powers = torch.exp2(largest.log2().floor() - 14)
    halves = [(level / powers).half().float() * powers for level in levels]
    return replace(weight, scales=halves[0], minimums=halves[1] if len(halves) > 1 else None)


def assert_close(out: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance * scale / 4)


@pytest.mark.parametrize(("kind", "group", "size_in"), slow_but(SHAPES, *_QUICK))
def test_products_equal_those_of_dequantized_weights(
    device: torch.device, kind: str, group: int | None, size_in: int
) -> None:
    """For partial tiles of outputs, and rows in one tile and in several. Only scales are rounded, to float16."""
    torch.manual_seed(0)
    weight = make_groups(kind, 70, group, size_in)
    x, bias = torch.randn(66, size_in).half(), torch.randn(70)
    exact = rounded(weight).dequantize(torch.float16).double()
    for rows in (3, 66) if size_in < 1000 else (3,):
        out = packed(device, weight)(x[:rows].to(device), bias.to(device), out_dtype=torch.float32)
        assert_close(out, x[:rows].double() @ exact.T + bias, 2e-5)


@pytest.mark.parametrize(("kind", "group", "size_in"), slow_but(SHAPES, *_QUICK))
def test_rows(device: torch.device, kind: str, group: int | None, size_in: int) -> None:
    torch.manual_seed(0)
    weight = make_groups(kind, 70, group, size_in)
    table = packed(device, weight)
    assert isinstance(table, PackedTable)
    indices = torch.tensor([69, 0, 3, 3, 64, *range(20)], device=device)
    assert torch.equal(table.rows(indices).cpu(), rounded(weight).dequantize(torch.float16)[indices.cpu()])
    assert table.rows(indices[:0]).shape == (0, size_in)


@pytest.mark.parametrize("kind", slow_but(["affine", "int8"], "affine"))
def test_a_row_does_not_depend_on_the_batch(device: torch.device, kind: str) -> None:
    torch.manual_seed(0)
    weight = packed(device, make_groups(kind, 20, 32, 1024), dtype=torch.bfloat16)
    x = torch.randn(16, 1024, device=device).bfloat16()
    together = weight(x, None)
    for first, count in ((0, 1), (9, 7)):
        assert torch.equal(weight(x[first : first + count], None), together[first : first + count])


@pytest.mark.skipif(gpu.is_interpreted(), reason="numpy's products, which the interpreter calls, depend on the shape")
@pytest.mark.parametrize(("kind", "group"), [("affine", 32), ("symmetric", 128), ("nf4", 64), ("e2m1", 16)])
def test_a_row_does_not_depend_on_the_tile(device: torch.device, kind: str, group: int) -> None:
    """Its bits are those of the product with the dequantized weight."""
    torch.manual_seed(0)
    weight = packed(device, make_groups(kind, 700, group, 4096), dtype=torch.bfloat16)
    assert isinstance(weight, GroupedGpuWeight)
    plain = PlainGpuWeight(weight.rows(torch.arange(700, device=device)))
    x = torch.randn(300, 4096, device=device).bfloat16()
    together = weight(x, None)
    assert torch.equal(together, plain(x, None))
    for count in (1, 16, 17, 64, 65, 200):
        assert torch.equal(weight(x[-count:], None), together[-count:])


def test_parts_of_several_formats(device: torch.device) -> None:
    """They follow each other; those of the same format are one weight, which can be a table."""
    torch.manual_seed(0)
    parts = [make_groups("Q4_K", 24, 32, 256), make_groups("int8", 40, 16, 256), make_groups("int8", 8, 16, 256)]
    weight, x, bias = packed(device, *parts), torch.randn(5, 256, device=device).half(), torch.randn(72, device=device)
    out = weight(x, bias, act="silu")
    ends = [0, 24, 64, 72]
    for part, begin, end in zip(parts, ends, ends[1:], strict=False):
        assert torch.equal(out[:, begin:end], packed(device, part)(x, bias[begin:end], act="silu"))
    assert isinstance(weight, GpuWeightParts)
    assert weight.nbytes == sum(packed(device, *some).nbytes for some in (parts[:1], parts[1:]))
    assert isinstance(packed(device, *parts[1:]), PackedTable)


@pytest.mark.parametrize("kind", ["affine", "nf4"])
def test_inputs_in_an_order_of_their_own(device: torch.device, kind: str) -> None:
    torch.manual_seed(0)
    weight, order, x = make_groups(kind, 40, 32, 192), torch.randperm(192), torch.randn(7, 192, device=device).half()
    ordered, plain = packed(device, replace(weight, order=order)), packed(device, weight)
    assert torch.equal(ordered(x, None), plain(x[:, order.to(device)].contiguous(), None))
    indices = torch.arange(40, device=device)
    assert isinstance(ordered, GroupedGpuWeight)
    assert isinstance(plain, GroupedGpuWeight)
    assert torch.equal(ordered.rows(indices)[:, order.to(device)], plain.rows(indices))
    with pytest.raises(ValueError, match="the order of a weight's inputs is not one of 192 inputs"):
        packed(device, replace(weight, order=order.clamp(min=1)))


def test_rows_with_nan_or_inf_become_nan(device: torch.device) -> None:
    x, weight = torch.randn(3, 128, device=device).half(), packed(device, make_groups("symmetric", 40, 64, 128))
    for odd in (torch.nan, torch.inf):
        x[1, 100] = odd
        out = weight(x, None)
        assert not out[1].isfinite().any()
        assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("group", "size_in"), [(192, 192), (320, 960), (16, 48), (128, 384)])
def test_each_input_of_a_block_has_a_scale(device: torch.device, group: int, size_in: int) -> None:
    """Kernels read 128 inputs at a time, and those past the last one have codes and scales of 0."""
    data = format_groups(make_groups("affine", 8, group, size_in), torch.float16, device)
    assert data.scales is not None
    assert data.groups is not None
    assert len(data.scales) * data.groups.group >= -(-size_in // 128) * 128


def test_what_is_kept_of_a_weight(device: torch.device) -> None:
    """Minimums are not, if one code stands for 0 in all groups; groups of powers of two are never cut."""

    def bits(kind: str, group: int) -> float:
        return 8 * packed(device, make_groups(kind, 128, group, 1024)).nbytes / (128 * 1024)

    per_output = 32 / 1024  # of a factor
    assert bits("affine", 32) == 5 + per_output
    assert bits("symmetric", 32) == 4.5 + per_output
    assert bits("symmetric", 128) == 4.125 + per_output
    assert bits("e2m1", 16) == 5 + per_output
    assert bits("int8", 64) == 8.25 + per_output
    assert bits("nf4", 64) == 4.25 + per_output + 16 * 32 / (128 * 1024)


def test_which_products_are_made_with_groups(device: torch.device) -> None:
    with native.disabled():
        assert can_pack_groups(torch.bfloat16, device)
        assert not can_pack_groups(torch.float32, device)
        assert pack_groups([make_groups("affine", 40, 8, 64)], torch.bfloat16, device) is None


def stacked(device: torch.device, weights: list[GroupedWeight]) -> StackedWeights:
    stack = StackedWeights(len(weights))
    for expert in reversed(range(len(weights))):  # checkpoints may have them in any order
        stack.put(expert, format_groups(weights[expert], torch.float16, device))
    return stack


def expected_experts(
    x: Tensor, gate_up: list[GroupedWeight], down: list[GroupedWeight], chosen: Tensor, weights: Tensor
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, experts in enumerate(chosen.tolist()):
        for rank, expert in enumerate(experts):
            if expert < 0:
                continue
            first, second = (rounded(stack[expert]).dequantize(torch.float16).double() for stack in (gate_up, down))
            inner = act_and_mul((x[token : token + 1].double() @ first.T).half(), "silu")
            out[token] += (inner.double() @ second.T)[0] * weights[token, rank]
    return out


def run(device: torch.device, x: Tensor, stacks: list[StackedWeights], chosen: Tensor, weights: Tensor) -> Tensor:
    act = partial(act_and_mul, act="silu")
    gate_up, down = stacks
    return run_experts(x.to(device), gate_up, down, act, chosen.to(device), weights.to(device)).cpu()


@pytest.mark.parametrize(
    ("kind", "group", "tokens"),
    slow_but(
        [("e2m1", 32, 3), ("affine", 16, 40), ("symmetric", 64, 1), ("int8", None, 3), ("nf4", 64, 3)],
        ("e2m1", 32, 3), ("int8", None, 3),
    ),
)  # fmt: skip
def test_experts(device: torch.device, kind: str, group: int | None, tokens: int) -> None:
    torch.manual_seed(0)
    experts, hidden, size, top_k = 5, 64, 64, 3
    x = torch.randn(tokens, hidden).half()
    gate_up = [make_groups(kind, 2 * size, group, hidden) for _ in range(experts)]
    down = [make_groups(kind, hidden, group, size) for _ in range(experts)]
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    chosen[:, 1] = torch.where(torch.arange(tokens) % 3 == 2, -1, chosen[:, 1])
    weights = torch.rand(tokens, top_k)
    stacks = [stacked(device, part) for part in (gate_up, down)]
    assert {stack.data.kind for stack in stacks} == {"groups"}
    out = run(device, x, stacks, chosen, weights)
    expected = expected_experts(x, gate_up, down, chosen, weights)
    assert (out - expected).norm() < 2e-3 * expected.norm()
    for token in range(min(tokens, 2)):
        part = slice(token, token + 1)
        assert torch.equal(run(device, x[part], stacks, chosen[part], weights[part]), out[part])


def test_experts_get_the_same_format(device: torch.device) -> None:
    """If one has minimums, all have; if one has other codes, or is plain, all are plain."""
    torch.manual_seed(0)
    symmetric, affine = make_groups("symmetric", 64, 32, 64), make_groups("affine", 64, 32, 64)
    zeros, odd = replace(symmetric, scales=0 * symmetric.scales), replace(symmetric, minimums=-7 * symmetric.scales)
    int8 = make_groups("int8", 64, 32, 64)
    x, every = torch.randn(4, 64).half(), torch.arange(4)[:, None]
    down = [make_groups("affine", 64, 32, 32)] * 4
    for mixed, kind in (
        ([symmetric, zeros, symmetric, symmetric], "groups"),
        ([symmetric, affine, odd, symmetric], "groups"),
        ([affine, affine, int8, symmetric], "plain"),
    ):
        stacks = [stacked(device, part) for part in (mixed, down)]
        assert stacks[0].data.kind == kind
        out = run(device, x, stacks, every, torch.ones(4, 1))
        expected = expected_experts(x, mixed, down, every, torch.ones(4, 1))
        assert (out - expected).norm() < 2e-3 * expected.norm()
    stack, plain = StackedWeights(2), torch.randn(64, 64, device=device).half()
    stack.put(1, format_groups(affine, torch.float16, device))
    stack.put(0, WeightData("plain", plain, None))
    assert torch.equal(stack.data.values[0], plain)
    assert torch.equal(stack.data.values[1].cpu(), rounded(affine).dequantize(torch.float16))
    assert not stack.accepts(WeightData("int4", plain, None))


@pytest.mark.skipif(gpu.is_interpreted(), reason="the interpreter has no graphs")
def test_products_in_a_cuda_graph(device: torch.device) -> None:
    torch.manual_seed(0)
    weight = packed(device, replace(make_groups("affine", 96, 32, 1024), order=torch.randperm(1024)))
    assert isinstance(weight, GroupedGpuWeight)
    tokens = torch.randint(96, (9,), device=device)

    def compute() -> Tensor:
        return weight(weight.rows(tokens), None)

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for _ in range(3):
        tokens.random_(96)
        graph.replay()
        assert torch.equal(out, compute())
