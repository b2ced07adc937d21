"""Linear layers with weights of groups: products, rows, and what packing makes of formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels import native, packed_groups
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.capture import CapturedCalls, Workspace
from quire.kernels.grouped import can_pack_groups, pack_groups
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.linear import PackedTable
from tests.support.groups import NF4, TABLES, make_groups
from tests.support.variants import slow_but

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="installed without a compiler")
CPU = torch.device("cpu")
ROUNDED = 2.0**-11  # relative, of scales: float16 has 11 bits
# Format, inputs of a group (None: all), inputs.
SHAPES: list[tuple[str, int | None, int]] = [
    ("affine", 32, 96),
    ("affine", 16, 48),
    ("affine", 128, 256),
    ("affine", None, 70),
    ("affine", 48, 96),
    ("symmetric", 32, 288),
    ("symmetric", 64, 320),
    ("Q4_K", 32, 512),
    ("Q4_K", 32, 576),
    ("nf4", 64, 192),
    ("nf4", 16, 80),
    ("e2m1", 16, 64),
    ("e2m1", 32, 64),
    ("int8", 32, 64),
    ("int8", 16, 112),
    ("int8", None, 75),
    ("int8 affine", 128, 384),
    ("Q6_K", 16, 272),
    ("6 bits", 64, 128),
    ("5 bits affine", 32, 96),
]


def pack(*parts: GroupedWeight, dtype: torch.dtype = torch.bfloat16) -> PackedTable:
    packed = pack_groups(parts, dtype, CPU)
    assert isinstance(packed, PackedTable)
    return packed


def bound(x: Tensor, weight: GroupedWeight) -> Tensor:
    """The largest error of a product.

    Inputs are rounded by up to 1/254 of the largest of 32, scales to float16, tables to integers.
    """
    exact, inputs = weight.dequantize(torch.float64).abs(), x.double().abs()
    if weight.order is not None:
        exact, inputs = exact[:, weight.order], inputs[:, weight.order]
    padding = -x.shape[1] % 32
    blocks = torch.nn.functional.pad(inputs, (0, padding)).unflatten(1, (-1, 32))
    rounding = (blocks.amax(2, keepdim=True) / 254 * 1.001).expand(blocks.shape).flatten(1)[:, : x.shape[1]]
    group = weight.group
    per_input = [
        part.abs().double().repeat_interleave(group, 1) for part in (weight.scales, weight.minimums) if part is not None
    ]
    codes = weight.values().double().abs()
    sizes = codes * per_input[0] + (per_input[1] if len(per_input) == 2 else 0)  # without cancellation
    table_error = 0 if weight.table is None else float(weight.table.abs().max()) / 250 * per_input[0]
    largest: Tensor = rounding @ exact.T + (inputs + rounding) @ (sizes * ROUNDED + table_error).T + 1e-30
    return largest


@pytest.mark.parametrize(("kind", "group", "size_in"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(kind: str, group: int | None, size_in: int, dtype: torch.dtype) -> None:
    """Close to those in float64, for whole and partial panels and tiles."""
    torch.manual_seed(0)
    for size_out, rows in ((70, 13), (32, 1), (5, 3), (257, 6)):
        weight = make_groups(kind, size_out, group, size_in)
        x, bias = (torch.randn(rows, size_in) * torch.logspace(-3, 3, rows)[:, None]).to(dtype), torch.randn(size_out)
        packed = pack(weight)
        expected = x.double() @ weight.dequantize(torch.float64).T
        out = packed(x, None, out_dtype=torch.float32)
        limit = bound(x, weight)
        assert ((out - expected).abs() <= limit).all()
        if rows > 3:
            assert (out - expected).norm() < 0.25 * limit.norm()  # roundings cancel each other out
        with_bias = packed(x, bias, act="silu")
        assert with_bias.dtype == dtype
        torch.testing.assert_close(with_bias, ACTIVATIONS["silu"](out + bias).to(dtype), rtol=0.02, atol=2e-3)


@pytest.mark.parametrize(("kind", "group", "size_in"), [shape for shape in SHAPES if shape[0] != "nf4"])
def test_integers_are_exact(kind: str, group: int | None, size_in: int) -> None:
    """Inputs that int8 has, and weights whose scales float16 has."""
    torch.manual_seed(0)
    weight = make_groups(kind, 45, group, size_in)
    if kind not in ("Q4_K", "Q6_K"):
        scales = torch.randint(-9, 10, weight.scales.shape).float() / 8
        minimums = None if weight.minimums is None else -8 * scales - float("affine" in kind)
        weight = replace(weight, scales=scales, minimums=minimums)
    x = torch.randint(-127, 128, (9, size_in)).float()
    x[:, ::32] = 127.0
    x[5] = 0.0
    expected = x.double() @ weight.dequantize(torch.float64).T
    torch.testing.assert_close(
        pack(weight)(x, None).double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
    )


@pytest.mark.parametrize(("kind", "group", "size_in"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows(kind: str, group: int | None, size_in: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, indices = make_groups(kind, 70, group, size_in), torch.tensor([69, 0, 31, 32, 69])
    rows = pack(weight, dtype=dtype).rows(indices)
    assert rows.dtype == dtype
    expected = weight.dequantize(torch.float32)[indices]
    largest = expected.abs().amax(1, keepdim=True)
    assert ((rows.float() - expected).abs() <= largest * (0.0065 if weight.table is not None else 0.004)).all()


@pytest.mark.parametrize(
    ("kind", "group", "size_in", "bits"),
    [
        ("affine", 32, 512, 5.0),
        ("symmetric", 32, 512, 4.5),
        ("affine", 128, 512, 4.25),
        ("Q4_K", 32, 512, 4.5),
        ("Q4_K", 32, 576, 4 + 2 / 3),
        ("Q6_K", 16, 512, 6.5625),
        ("int8", 32, 512, 8.5),
    ],
)
def test_sizes(kind: str, group: int, size_in: int, bits: float) -> None:
    """Bits of a weight, but for 4 bytes of an output."""
    torch.manual_seed(0)
    packed = pack(make_groups(kind, 64, group, size_in))
    assert packed.nbytes == 64 * (size_in * bits / 8 + 4)


@pytest.mark.parametrize(
    ("kind", "group", "size_in"), [("affine", 32, 96), ("nf4", 64, 128), ("Q6_K", 16, 256), ("int8", None, 70)]
)
def test_inputs_in_another_order(kind: str, group: int | None, size_in: int) -> None:
    """The products and rows are those of the weight with its inputs in the layer's order."""
    torch.manual_seed(0)
    weight, order, x = (
        make_groups(kind, 40, group, size_in),
        torch.randperm(size_in),
        torch.randn(7, size_in).bfloat16(),
    )
    ordered = pack(replace(weight, order=order))
    assert torch.equal(ordered(x, None), pack(weight)(x[:, order].contiguous(), None))
    rows = torch.arange(40)
    assert torch.equal(ordered.rows(rows)[:, order], pack(weight).rows(rows))
    with pytest.raises(ValueError, match="the order of a weight's inputs"):
        pack(replace(weight, order=torch.zeros(size_in, dtype=torch.int64)))


def test_parts_of_several_formats() -> None:
    """Their outputs follow each other; parts that are alike are in the same panels."""
    torch.manual_seed(0)
    parts = [
        make_groups("Q4_K", 40, 32, 256),
        make_groups("Q4_K", 24, 32, 256),
        make_groups("Q6_K", 24, 16, 256),
        make_groups("nf4", 3, 64, 256),
    ]
    x, bias = torch.randn(13, 256).bfloat16(), torch.randn(91)
    packed, begin = pack(*parts), 0
    out = packed(x, bias, act="gelu")
    for part in parts:
        size = part.shape[0]
        assert torch.equal(out[:, begin : begin + size], pack(part)(x, bias[begin : begin + size], act="gelu"))
        begin += size
    assert out.shape == (13, begin)
    assert packed.nbytes < sum(pack(part).nbytes for part in parts)


def test_outputs_with_a_stride() -> None:
    """Nothing else is written."""
    torch.manual_seed(0)
    packed, x = pack(make_groups("affine", 45, 32, 64)), torch.randn(7, 64).bfloat16()
    memory = torch.full((9, 60), -777.0, dtype=torch.bfloat16)
    expected = packed(x, None, act="relu")
    packed(x, None, act="relu", out=memory[1:-1, 5:50])
    assert torch.equal(memory[1:-1, 5:50], expected)
    memory[1:-1, 5:50] = -777.0
    assert (memory == -777.0).all()


_BATCHED = [
    ("Q4_K", 32, 512),
    ("Q6_K", 16, 512),
    ("nf4", 64, 128),
    ("int8", 32, 96),
    ("affine", 16, 48),
    ("6 bits", 64, 128),
]


@pytest.mark.parametrize(("kind", "group", "size_in"), slow_but(_BATCHED, _BATCHED[0], _BATCHED[1]))
def test_a_row_does_not_depend_on_the_batch(kind: str, group: int, size_in: int) -> None:
    torch.manual_seed(0)
    x, packed = torch.randn(80, size_in).bfloat16(), pack(make_groups(kind, 200, group, size_in))
    together = packed(x, None, out_dtype=torch.float32)
    for count in (*range(1, 40), 65, 79):
        assert torch.equal(packed(x[:count], None, out_dtype=torch.float32), together[:count])
        assert torch.equal(packed(x[-count:], None, out_dtype=torch.float32), together[-count:])


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["affine", "nf4", "int8"])
def test_rows_with_nan_or_inf_become_nan(kind: str, odd: float) -> None:
    torch.manual_seed(0)
    x, packed = torch.randn(4, 64), pack(make_groups(kind, 40, 32, 64))
    x[2, 17] = odd
    out = packed(x, None)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-30, 1e30])
def test_inputs_of_any_size(value: float) -> None:
    torch.manual_seed(0)
    weight, x = make_groups("affine", 40, 32, 64), torch.full((2, 64), value)
    expected = x.double() @ weight.dequantize(torch.float64).T
    assert ((pack(weight)(x, None) - expected).abs() <= bound(x, weight) + 1e-36).all()


def test_strides_and_empty_inputs() -> None:
    torch.manual_seed(0)
    packed, wide = pack(make_groups("affine", 40, 32, 64)), torch.randn(5, 192).bfloat16()
    part = wide[:, 64:128]
    assert torch.equal(packed(part, None), packed(part.contiguous(), None))
    assert torch.equal(packed(part.T.contiguous().T, None), packed(part, None))
    assert packed(part[:0], None).shape == (0, 40)


def test_float16_inputs() -> None:
    torch.manual_seed(0)
    packed, x = pack(make_groups("affine", 40, 32, 64), dtype=torch.float16), torch.randn(5, 64).half()
    expected = packed(x.float(), None)
    assert torch.equal(packed(x, None), expected.half())
    assert torch.equal(packed(x, None, out_dtype=torch.float32), expected)
    out = torch.empty(5, 40, dtype=torch.float16)
    assert packed(x, None, out=out) is out
    assert torch.equal(out, expected.half())


def test_calls_are_captured_and_replayed() -> None:
    torch.manual_seed(0)
    packed, table = (
        pack(make_groups("Q4_K", 40, 32, 256), make_groups("nf4", 24, 64, 256)),
        pack(make_groups("Q6_K", 50, 16, 256)),
    )
    tokens, results = torch.randint(50, (9,)), list[Tensor]()

    def step() -> None:
        results.append(packed(table.rows(tokens), None))

    calls = CapturedCalls(step, Workspace(), [9, 9])
    assert calls.complete
    before = results[0].clone()
    tokens[:4] = torch.randint(50, (4,))
    calls.replay([9, 9])
    assert torch.equal(results[0], packed(table.rows(tokens), None))
    assert torch.equal(results[0][4:], before[4:])


def test_replays_of_several_weights_compute_what_their_calls_do() -> None:
    """A replay prefetches the weight of the next call, which may be smaller, and the last of all has none."""
    torch.manual_seed(0)
    sizes = [(200, 256), (20, 200), (300, 20), (256, 300)]
    weights = [pack(make_groups("int8", size_out, None, size_in)) for size_out, size_in in sizes]
    x = torch.randn(20, 256).bfloat16()

    def products(rows: int) -> Tensor:
        y = x[:rows]
        for weight in weights:
            y = weight(y, None)
        return y

    results = list[Tensor]()
    calls = CapturedCalls(lambda: results.append(products(20)), Workspace(), [20, 20])
    assert calls.complete
    for rows in (1, 7, 20):
        x.normal_()
        calls.replay([rows, rows])
        assert torch.equal(results[0][:rows], products(rows))


def test_which_weights_are_packed() -> None:
    assert can_pack_groups(torch.bfloat16, CPU)
    assert can_pack_groups(torch.float16, CPU)
    assert not can_pack_groups(torch.float32, CPU)
    assert not can_pack_groups(torch.bfloat16, torch.device("meta"))
    assert pack_groups([make_groups("affine", 40, 8, 64)], torch.bfloat16, CPU) is None
    assert pack_groups([make_groups("affine", 40, 32, 64)], torch.float32, CPU) is None
    with native.disabled():
        assert not can_pack_groups(torch.bfloat16, CPU)
        assert pack_groups([make_groups("affine", 40, 32, 64)], torch.bfloat16, CPU) is None


@pytest.mark.parametrize(
    "change", [lambda scales: scales * 0, lambda scales: scales.index_fill(0, torch.tensor([3]), 0)]
)
def test_scales_of_zero(change: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    for kind, group in (("symmetric", 32), ("Q6_K", 16), ("affine", 64)):
        weight = make_groups(kind, 40, group, 256)
        weight = replace(weight, scales=change(weight.scales))
        x = torch.randn(3, 256)
        out = pack(weight)(x, None)
        assert ((out - x.double() @ weight.dequantize(torch.float64).T).abs() <= bound(x, weight) + 1e-6).all()


def test_a_table_keeps_its_proportions() -> None:
    """Those of integers are exact; nf4's values move by up to 1/254 of the largest."""
    for table, error in (
        (TABLES["e2m1"], 0.0),
        (NF4, 1 / 254),
        (torch.arange(-127.0, 112.0, 15), 0.0),
        (torch.zeros(16), 0.0),
    ):
        codes, unit = packed_groups._integers(table)
        values = (codes.view(torch.uint8).double() - 128) * unit
        assert (values - table.double()).abs().max() <= error + 1e-12
