"""Linear layers with packed weights."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import native
from quire.kernels.linear import pack, packed_linear, packs

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="installed without a compiler")


@pytest.mark.parametrize(("size_in", "size_out"), [(64, 96), (30, 33), (2, 1), (1024, 100), (256, 640)])
@pytest.mark.parametrize("rows", [1, 2, 11, 12, 13, 25, 150])
def test_it_is_the_product(size_in: int, size_out: int, rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, size_in).bfloat16(), torch.randn(size_out, size_in).bfloat16()
    bias = torch.randn(size_out)
    expected = x.float() @ weight.float().T
    out = packed_linear(x, pack(weight), size_out, None, wide=True)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    narrow = packed_linear(x, pack(weight), size_out, bias)
    torch.testing.assert_close(narrow, (out + bias).bfloat16())


def test_a_row_is_the_same_in_any_company() -> None:
    torch.manual_seed(0)
    x, packed = torch.randn(40, 512).bfloat16(), pack(torch.randn(200, 512).bfloat16())
    together = packed_linear(x, packed, 200, None)
    for count in range(1, 40):
        assert torch.equal(packed_linear(x[:count], packed, 200, None), together[:count])


def test_rows_with_gaps_and_without_any() -> None:
    torch.manual_seed(0)
    wide, weight = torch.randn(5, 3 * 64).bfloat16(), torch.randn(32, 64).bfloat16()
    packed = pack(weight)
    part = wide[:, 64:128]
    assert torch.equal(packed_linear(part, packed, 32, None), packed_linear(part.contiguous(), packed, 32, None))
    assert torch.equal(packed_linear(wide.T[:64].T, packed, 32, None), packed_linear(wide[:, :64], packed, 32, None))
    assert packed_linear(part[:0], packed, 32, None).shape == (0, 32)


def test_what_is_not_packed() -> None:
    assert not packs(torch.randn(4, 4))
    assert not packs(torch.randn(4, 3).bfloat16())
    with native.disabled():
        assert not packs(torch.randn(4, 4).bfloat16())
