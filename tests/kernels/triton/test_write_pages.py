"""The Triton kernel that writes keys and values to pages against its torch reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import native, write_pages
from quire.kernels.int8_pages import SCALE

SCALES = (0.3, 2.0)  # of float8 pages


def empty_pages(dtype: torch.dtype, page_dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Keys of 20 and values of 36 elements, 3 heads, 10 blocks of 5, with a pattern in each byte."""
    extra, itemsize = (SCALE, 1) if page_dtype is torch.int8 else (0, page_dtype.itemsize)
    bytes_of = [(10, 3, 5, (size + extra) * itemsize) for size in (20, 36)]
    return [torch.full(s, 7, dtype=torch.uint8, device=device).view(page_dtype).transpose(0, 1) for s in bytes_of]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("latent", [False, True])
def test_write_pages_equals_its_reference(
    device: torch.device, dtype: torch.dtype, page_dtype: torch.dtype | None, latent: bool
) -> None:
    """Byte for byte, also of what is not written; tokens with negative slots are not."""
    torch.manual_seed(0)
    page_dtype = page_dtype or dtype
    k, v = (torch.randn(8, 6, size, device=device).to(dtype)[:, ::2] * 3 for size in (20, 36))
    k[0, 0, 0], k[1, 1] = 2000.0, 0.0
    slots = torch.tensor([3, 17, 40, -1, 5, 12, 33, -5], device=device)
    ours, theirs = (empty_pages(dtype, page_dtype, device) for _ in range(2))
    if latent:
        ours[1], theirs[1] = (pages[0][..., : 12 + pages[0].shape[3] - 20] for pages in (ours, theirs))
    with native.disabled():
        write_pages.write_pages(*ours, slots, k, None if latent else v, *SCALES)
    write_pages.write_reference(*theirs, slots, k, None if latent else v, SCALES)
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.equal(mine.contiguous().view(torch.uint8), reference.contiguous().view(torch.uint8))


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_an_int8_row_with_nan_or_inf_is_not_finite(device: torch.device, odd: float) -> None:
    pages = [torch.zeros(1, 1, 4, SCALE + 8, dtype=torch.int8, device=device) for _ in range(2)]
    k = torch.ones(2, 1, 8, device=device)
    k[1, 0, 3] = odd
    with native.disabled():
        write_pages.write_pages(*pages, torch.arange(2, device=device), k, k)
    scales = pages[0][..., :SCALE].contiguous().view(torch.float32)
    assert scales[0, 0, 0].isfinite()
    assert not scales[0, 0, 1].isfinite()


def test_more_heads_than_a_program_writes(device: torch.device) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 20, 128, device=device)
    pages = [torch.zeros(20, 2, 4, 128, device=device) for _ in range(2)]
    with native.disabled():
        write_pages.write_pages(*pages, torch.tensor([1, 6, 3], device=device), k, v)
    for page, rows in zip(pages, (k, v), strict=True):
        assert torch.equal(page[:, [0, 1, 0], [1, 2, 3]].transpose(0, 1), rows)
