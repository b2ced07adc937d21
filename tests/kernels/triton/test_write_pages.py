"""The Triton kernel that writes keys and values to pages against its torch reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import native, write_pages
from quire.kernels.int8_pages import SCALE, scale_bytes

SCALES = (0.3, 2.0)  # of float8 pages


def empty_pages(dtype: torch.dtype, page_dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys of 20 and values of 144 elements, 3 heads, 10 blocks of 5, with a pattern in each byte."""

    def pages(size: int) -> Tensor:
        extra = scale_bytes(size) if page_dtype is torch.int8 else 0
        shape = (10, 3, 5, size * page_dtype.itemsize + extra)
        return torch.full(shape, 7, dtype=torch.uint8, device=device).view(page_dtype).transpose(0, 1)

    return pages(20), pages(144)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("of_heads", [False, True])
def test_write_pages_equals_its_reference(
    device: torch.device, dtype: torch.dtype, page_dtype: torch.dtype | None, latent: bool, of_heads: bool
) -> None:
    """Byte for byte, also of what is not written; tokens with negative slots are not."""
    torch.manual_seed(0)
    page_dtype = page_dtype or dtype
    head_scales = torch.tensor([[0.5, 2.0, 0.1], [3.0, 1.0, 0.7]], device=device) if of_heads else None
    k, v = (torch.randn(8, 6, size, device=device).to(dtype)[:, ::2] * 3 for size in (20, 144))
    k[0, 0, 0], k[1, 1] = 2000.0, 0.0
    slots = torch.tensor([3, 17, 40, -1, 5, 12, 33, -5], device=device)
    (keys, values), (own_keys, own_values) = (empty_pages(dtype, page_dtype, device) for _ in range(2))
    if latent:
        values, own_values = (pages[..., : pages.shape[3] - 8] for pages in (keys, own_keys))
    with native.disabled():
        write_pages.write_pages(keys, values, slots, k, None if latent else v, *SCALES, head_scales)
    write_pages.write_reference(own_keys, own_values, slots, k, None if latent else v, SCALES, head_scales)
    for mine, reference in ((keys, own_keys), (values, own_values)):
        assert torch.equal(mine.contiguous().view(torch.uint8), reference.contiguous().view(torch.uint8))


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_an_int8_row_with_nan_or_inf_is_not_finite(device: torch.device, odd: float) -> None:
    keys, values = torch.zeros(2, 1, 1, 4, SCALE + 8, dtype=torch.int8, device=device)
    k = torch.ones(2, 1, 8, device=device)
    k[1, 0, 3] = odd
    with native.disabled():
        write_pages.write_pages(keys, values, torch.arange(2, device=device), k, k)
    scales = keys[..., :SCALE].contiguous().view(torch.float32)
    assert scales[0, 0, 0].isfinite()
    assert not scales[0, 0, 1].isfinite()


def test_more_heads_than_a_program_writes(device: torch.device) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 20, 128, device=device)
    keys, values = torch.zeros(2, 20, 2, 4, 128, device=device)
    with native.disabled():
        write_pages.write_pages(keys, values, torch.tensor([1, 6, 3], device=device), k, v)
    for page, rows in ((keys, k), (values, v)):
        assert torch.equal(page[:, [0, 1, 0], [1, 2, 3]].transpose(0, 1), rows)
