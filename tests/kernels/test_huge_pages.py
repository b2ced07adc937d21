"""Tensors in huge pages."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from quire.kernels.huge_pages import empty_in_huge_pages

_HUGE_PAGE = 2 << 20


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float32])
def test_tensors_are_aligned_and_apart(dtype: torch.dtype) -> None:
    tensors = [empty_in_huge_pages((count, 1), dtype) for count in (1, 3, 1000, 7)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    for value, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        assert tensor.dtype == dtype
        assert (tensor == value).all()


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_large_tensors(rows: int) -> None:
    tensor = empty_in_huge_pages((rows, _HUGE_PAGE + 100), torch.uint8)
    assert tensor.shape == (rows, _HUGE_PAGE + 100)
    assert tensor.dtype == torch.uint8


@pytest.mark.skipif(sys.platform != "linux", reason="reads what is mapped in /proc")
def test_memory_is_freed_with_the_tensors_in_it() -> None:
    def resident() -> int:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) << 10

    before = resident()
    tensors = [empty_in_huge_pages((1 << 20,), torch.uint8).fill_(1) for _ in range(300)]
    assert resident() - before > 250 << 20
    del tensors
    gc.collect()
    assert resident() - before < 100 << 20
