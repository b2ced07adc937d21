"""Linear layers with packed weights."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import linear, native, packed_groups
from quire.kernels.activation import ACTIVATIONS, kernel_activation
from quire.kernels.linear import PackedBFloat16, Quantization, pack_weight
from quire.kernels.packed_groups import PackedGroups

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="installed without a compiler")
ROWS = [1, 2, 6, 7, 11, 12, 13, 25, 150]


@pytest.mark.parametrize(("size_in", "size_out"), [(64, 96), (30, 33), (2, 1), (1024, 100), (256, 640), (2048, 40)])
@pytest.mark.parametrize("rows", ROWS)
def test_linear(size_in: int, size_out: int, rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, size_in).bfloat16(), torch.randn(size_out, size_in).bfloat16()
    bias, panels = torch.randn(size_out), PackedBFloat16(weight)
    out = panels(x, None, out_dtype=torch.float32)
    torch.testing.assert_close(out, x.float() @ weight.float().T, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(panels(x, bias), (out + bias).bfloat16())


def test_rows_of_a_packed_weight() -> None:
    weight = torch.randn(100, 64).bfloat16()
    rows = torch.tensor([0, 99, 32, 31, 0])
    assert torch.equal(PackedBFloat16(weight).rows(rows), weight[rows])


@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.012), ("int4", 0.09)])
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 96), (1024, 100), (256, 1100), (4096, 40)])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_weights_are_close(
    size_in: int, size_out: int, rows: int, quantization: Quantization, error: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, size_in).to(dtype), torch.randn(size_out, size_in), torch.randn(size_out)
    packed = pack_weight(weight.to(dtype), quantization)
    assert isinstance(packed, PackedGroups)
    expected = x.float() @ weight.to(dtype).float().T + bias
    out = packed(x, bias, out_dtype=torch.float32)
    assert (out - expected).norm() / expected.norm() < error
    assert packed(x, bias).dtype == dtype
    torch.testing.assert_close(packed(x, bias), out.to(dtype))


def test_some_rows_of_4_bits_get_6() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 256).bfloat16(), torch.randn(96, 256).bfloat16()
    mixed, plain = pack_weight(weight, "int4", six_bit_rows=32), pack_weight(weight, "int4")
    six, eight = pack_weight(weight, "int4", six_bit_rows=96), pack_weight(weight, "int8")
    assert mixed is not None
    assert plain is not None
    assert six is not None
    assert eight is not None
    assert torch.equal(mixed(x, None)[:, :64], plain(x, None)[:, :64])
    assert torch.equal(mixed(x, None)[:, 64:], six(x, None)[:, 64:])
    expected = x.float() @ weight.float().T
    assert (six(x, None, out_dtype=torch.float32) - expected).norm() / expected.norm() < 0.025
    assert plain.nbytes < mixed.nbytes < six.nbytes < eight.nbytes


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "quick_gelu", "silu", "relu"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size_out"), [(1, 16), (7, 205), (13, 44), (40, 1536)])
def test_an_activation_is_that_of_the_outputs(
    rows: int, size_out: int, quantization: str, act: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch computes it, whatever was in the memory of the output; NaN stays."""
    torch.manual_seed(0)
    x, bias = torch.randn(rows, 64).bfloat16(), torch.randn(size_out)
    bias[:4] = torch.tensor([200.0, -200.0, torch.nan, -8.0])
    panels = pack_weight(torch.randn(size_out, 64).bfloat16(), quantization)  # type: ignore[arg-type]
    name = kernel_activation(act)
    assert panels is not None
    assert name is not None
    for module in (linear, packed_groups):
        monkeypatch.setattr(module, "empty", lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype))
    plain = panels(x, bias, out_dtype=dtype)
    out = panels(x, bias, act=name, out_dtype=dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out, ACTIVATIONS[act](plain.float()).to(dtype), equal_nan=True)
    assert out[:, 2].isnan().all()
    assert out.isnan().sum() == rows


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_row_does_not_depend_on_the_batch(quantization: str) -> None:
    torch.manual_seed(0)
    x, panels = torch.randn(40, 512).bfloat16(), pack_weight(torch.randn(200, 512).bfloat16(), quantization)  # type: ignore[arg-type]
    assert panels is not None
    together = panels(x, None)
    for count in range(1, 40):
        assert torch.equal(panels(x[:count], None), together[:count])


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(("rows", "size_out"), [(385, 1), (389, 33), (1001, 100), (770, 513)])
def test_rows_of_a_product_with_few_outputs(rows: int, size_out: int, quantization: str) -> None:
    """Threads share the rows as well; each row is written, with the bits that it has in a small batch."""
    torch.manual_seed(0)
    x, panels = torch.randn(rows, 64).bfloat16(), pack_weight(torch.randn(size_out, 64).bfloat16(), quantization)  # type: ignore[arg-type]
    assert panels is not None
    together = torch.full((rows, size_out), torch.nan)
    panels(x, None, out=together)
    parts = [panels(part, None, out_dtype=torch.float32) for part in x.split(50)]
    assert torch.equal(together, torch.cat(parts))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_strides_and_empty_inputs(quantization: str) -> None:
    torch.manual_seed(0)
    panels = pack_weight(torch.randn(32, 64).bfloat16(), quantization)  # type: ignore[arg-type]
    assert panels is not None
    qkv = torch.randn(5, 3 * 64).bfloat16()
    part = qkv[:, 64:128]
    assert torch.equal(panels(part, None), panels(part.contiguous(), None))
    assert torch.equal(panels(part.T.contiguous().T, None), panels(part, None))
    assert panels(part[:0], None).shape == (0, 32)
    no_outputs = pack_weight(torch.randn(0, 64).bfloat16(), quantization)  # type: ignore[arg-type]
    assert no_outputs is not None
    assert no_outputs(part, None).shape == (5, 0)


def test_the_format_depends_on_sizes_and_dtypes() -> None:
    assert pack_weight(torch.randn(4, 4), "none") is None
    assert pack_weight(torch.randn(4, 3).bfloat16(), "none") is None
    assert pack_weight(torch.randn(4, 10), "int4") is None
    assert isinstance(pack_weight(torch.randn(4, 16), "int4"), PackedGroups)
    assert isinstance(pack_weight(torch.randn(4, 10).bfloat16(), "int8"), PackedBFloat16)
    with native.disabled():
        assert pack_weight(torch.randn(4, 4).bfloat16(), "none") is None
