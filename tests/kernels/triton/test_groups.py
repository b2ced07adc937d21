"""The Triton kernels of weights in groups: products, rows, and experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.grouped import pack_groups
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
    for rows in (3, 66):
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
