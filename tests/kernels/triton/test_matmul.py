"""The Triton kernels of matrix products: plain, quantized and scaled weights."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import gpu
from quire.kernels.activation import ACTIVATIONS, kernel_activation
from quire.kernels.gpu_weights import GpuWeight, PlainGpuWeight, format_weight, prepare_rows
from quire.kernels.linear import pack_exact_weight, pack_weight
from quire.kernels.quantized import GROUP, to_4_bits, to_8_bits
from tests.support.variants import slow_but
from tests.support.weights import plain_rows, plain_weight

FORMATS = ["none", "int8", "int4", "fp8", "fp8_blocks"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
POISON = -777.0


def expected_product(x: Tensor, packed: GpuWeight) -> Tensor:
    """What the kernels are to compute: the product of the quantized rows with the quantized weight, in float64."""
    rows = prepare_rows(x, packed.data)
    values = plain_rows(rows)
    return values @ plain_weight(packed.data, x.shape[1]).T


def assert_product(out: Tensor, expected: Tensor, dtype: torch.dtype, quantization: str) -> None:
    """Close to the product in float64. Hopper adds 128 products of float8 with 14 bits."""
    tolerance = max(TOLERANCE[dtype], 1e-3) if "fp8" in quantization and out.is_cuda else TOLERANCE[dtype]
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * scale / 4)


SIZES = [(1, 192, 70), (17, 128, 64), (70, 64, 130), (3, 1040, 33)]  # rows, inputs, outputs
# Each format in each size, and with each type.
_QUICK = [
    (quantization, DTYPES[(first + second) % 3], sizes)
    for first, quantization in enumerate(FORMATS)
    for second, sizes in enumerate(SIZES)
]


@pytest.mark.parametrize(("quantization", "dtype", "sizes"), slow_but(product(FORMATS, DTYPES, SIZES), *_QUICK))
def test_a_product(device: torch.device, quantization: str, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    """Odd numbers of groups, segments of sums, more than a tile of rows and outputs; nothing else is written."""
    rows, size_in, size_out = sizes
    torch.manual_seed(0)
    x = torch.randn(rows, size_in, device=device).to(dtype)
    weight = (torch.randn(size_out, size_in, device=device) * size_in**-0.5).to(dtype)
    packed = GpuWeight(format_weight(weight, quantization))
    expected = expected_product(x, packed)
    memory = torch.full((rows + 2, size_out + 2), POISON, device=device, dtype=dtype)
    out = packed(x, None, out=memory[1:-1, 1:-1])
    assert_product(out, expected, dtype, quantization)
    memory[1:-1, 1:-1] = POISON
    assert (memory == POISON).all()
    exact = packed(x, None, out_dtype=torch.float32)
    assert exact.dtype == torch.float32
    assert_product(exact, expected, torch.float32, quantization)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_new", "quick_gelu", "relu"])
@pytest.mark.parametrize("size_in", [64, 1024])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bias_and_activation(device: torch.device, act: str, size_in: int, quantization: str) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(3, size_in, device=device), torch.randn(48, device=device)
    bias[:3] = torch.tensor([200.0, -200.0, torch.nan])
    packed = GpuWeight(format_weight(torch.randn(48, size_in, device=device) * size_in**-0.5, quantization))
    name = kernel_activation(act)
    assert name is not None
    out = packed(x, bias, act=name)
    expected = ACTIVATIONS[act](packed(x, None) + bias)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-6, equal_nan=True)
    assert out[:, 2].isnan().all()


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("size_in", [128, 1024])
def test_a_row_does_not_depend_on_the_batch(device: torch.device, quantization: str, size_in: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, size_in, device=device).bfloat16()
    packed = GpuWeight(format_weight(torch.randn(70, size_in, device=device).bfloat16(), quantization))
    together = packed(x, None)
    for first, count in ((0, 1), (3, 2), (9, 7)):
        assert torch.equal(packed(x[first : first + count], None), together[first : first + count])


@pytest.mark.skipif(gpu.is_interpreted(), reason="numpy's products, which the interpreter calls, depend on the shape")
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("size_in", [128, 1024, 4096])
def test_a_row_does_not_depend_on_the_tile(device: torch.device, quantization: str, size_in: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, size_in, device=device).bfloat16()
    packed = GpuWeight(format_weight(torch.randn(700, size_in, device=device).bfloat16(), quantization))
    together = packed(x, None)
    for count in (1, 16, 17, 64, 65, 200):
        assert torch.equal(packed(x[-count:], None), together[-count:])


def test_segments_are_added_in_the_same_order(device: torch.device) -> None:
    """Integer sums are exact, so launches with and without parallel segments agree in the interpreter, too."""
    torch.manual_seed(0)
    x = torch.randn(80, 1024, device=device)
    packed = GpuWeight(format_weight(torch.randn(32, 1024, device=device), "int8"))
    assert torch.equal(packed(x[:40], None), packed(x, None)[:40])


@pytest.mark.parametrize("quantization", FORMATS)
def test_rows_with_nan_or_inf_become_nan(device: torch.device, quantization: str) -> None:
    x = torch.randn(3, 128, device=device)
    packed = GpuWeight(format_weight(torch.randn(40, 128, device=device), quantization))
    for odd in (torch.nan, torch.inf):
        x[1, 100] = odd
        out = packed(x, None)
        assert not out[1].isfinite().any()
        assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("quantization", FORMATS)
def test_strides_and_empty_inputs(device: torch.device, quantization: str) -> None:
    packed = GpuWeight(format_weight(torch.randn(32, 64, device=device).bfloat16(), quantization))
    part = torch.randn(5, 192, device=device).bfloat16()[:, 64:128]
    assert torch.equal(packed(part, None), packed(part.contiguous(), None))
    assert torch.equal(packed(part.T.contiguous().T, None), packed(part, None))
    assert packed(part[:0], None).shape == (0, 32)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 40), pairs=st.integers(1, 5), size_out=st.integers(1, 150), seed=st.integers(0, 99),
    quantization=st.sampled_from(FORMATS),
)  # fmt: skip
def test_products_of_any_size(rows: int, pairs: int, size_out: int, seed: int, quantization: str) -> None:
    on_gpu = torch.cuda.is_available()
    generator = torch.Generator().manual_seed(seed)
    x, weight = (
        torch.randn(rows, pairs * 16, generator=generator),
        torch.randn(size_out, pairs * 16, generator=generator),
    )
    if on_gpu:
        x, weight = x.cuda(), weight.cuda()
        packed = GpuWeight(format_weight(weight, quantization))
        assert_product(packed(x, None), expected_product(x, packed), torch.float32, quantization)
        return
    with gpu.interpreted():
        packed = GpuWeight(format_weight(weight, quantization))
        assert_product(packed(x, None), expected_product(x, packed), torch.float32, quantization)


def test_quantized_values_are_those_of_cpus(device: torch.device) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 3 * GROUP, device=device)
    weight[3] = 0.0
    integers, scale = to_8_bits(weight)
    assert torch.equal(plain_weight(format_weight(weight, "int8"), 192), integers.double() * scale.double())
    groups, scales = to_4_bits(weight)
    expected = (groups.double() * scales.double()[..., None]).flatten(1)
    assert torch.equal(plain_weight(format_weight(weight, "int4"), 192), expected)
    assert format_weight(weight, "int4").nbytes < 0.4 * format_weight(weight, "none").nbytes


@pytest.mark.parametrize(
    ("quantization", "error"), [("int8", 0.015), ("fp8", 0.05), ("fp8_blocks", 0.05), ("int4", 0.12)]
)
def test_quantized_products_are_close(device: torch.device, quantization: str, error: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(20, 512, device=device), torch.randn(96, 512, device=device)
    out, expected = GpuWeight(format_weight(weight, quantization))(x, None), x @ weight.T
    assert (out - expected).norm() / expected.norm() < error


@pytest.mark.parametrize("scale_rows", [1, 128])
@pytest.mark.parametrize(("rows", "size_in", "size_out"), [(1, 256, 130), (20, 300, 64), (3, 1280, 200)])
def test_blocks_of_float8(device: torch.device, scale_rows: int, rows: int, size_in: int, size_out: int) -> None:
    """As in DeepSeek's checkpoints: 128 x 128 elements of a weight share a scale."""
    from quire.kernels.quantize import quantize_rows
    from quire.kernels.triton.matmul import matmul

    torch.manual_seed(0)
    x = torch.randn(rows, size_in, device=device)
    weight = torch.randn(size_out, size_in, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-size_out // scale_rows), -(-size_in // 128), device=device) + 0.5
    values, row_scales = quantize_rows(x, torch.float8_e4m3fn, 128)
    out = torch.full((rows, size_out), torch.nan, device=device)
    matmul(values, weight, out, kind="blocks", x_scales=row_scales, scales=scales, scale_rows=scale_rows)
    expanded = scales.repeat_interleave(scale_rows, 0)[:size_out].repeat_interleave(128, 1)[:, :size_in]
    plain_rows = values.double() * row_scales.repeat_interleave(128, 1)[:, :size_in]
    assert_product(out, plain_rows @ (weight.double() * expanded).T, torch.float32, "fp8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("powers", [False, True])
def test_blocks_of_a_checkpoint_are_found_again(device: torch.device, dtype: torch.dtype, powers: bool) -> None:
    """Weights that were float8 in blocks get the same values, although they were unpacked in between."""
    torch.manual_seed(0)
    weight = torch.randn(300, 208, device=device)
    first = format_weight(weight, "fp8_blocks")
    assert first.scales is not None
    scales = torch.exp2(first.scales.log2().ceil()) if powers else first.scales
    expanded = scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :208]
    values = (weight / expanded).to(torch.float8_e4m3fn)
    unpacked = (values.float() * expanded).to(dtype)
    again = format_weight(unpacked, "fp8_blocks")
    assert again.scales is not None
    assert torch.equal(again.values.float(), values.float())
    torch.testing.assert_close(again.scales, scales, rtol=0.0 if powers else 4e-3, atol=0.0)


def test_which_weights_are_packed(device: torch.device) -> None:
    from quire.kernels import native

    with native.disabled():
        weight = torch.randn(8, 64, device=device)
        assert pack_weight(weight, "none") is None
        assert isinstance(pack_weight(weight.bfloat16(), "none"), PlainGpuWeight)
        assert isinstance(pack_weight(weight, "fp8"), GpuWeight)
        assert isinstance(pack_exact_weight(weight), GpuWeight)
        odd = pack_weight(torch.randn(8, 10, device=device), "int8")
        assert isinstance(odd, GpuWeight)
        assert odd.data.kind == "plain"
