"""Copies of tensors in huge pages."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from quire.kernels.huge_pages import in_huge_pages

_CHUNK = 64 << 20


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float32])
def test_copies_are_equal_and_apart(dtype: torch.dtype) -> None:
    tensors = [torch.arange(count).to(dtype).view(-1, 1) for count in (1, 3, 1000, 7)]
    copies = [in_huge_pages(tensor) for tensor in tensors]
    copies[1].fill_(5)
    for index, (tensor, copy) in enumerate(zip(tensors, copies, strict=True)):
        assert copy.data_ptr() % 64 == 0
        assert index == 1 or torch.equal(copy, tensor)
    assert tensors[1].tolist() == [[0], [1], [2]]


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_large_tensors(rows: int) -> None:
    tensor = torch.zeros(rows, _CHUNK // 2 + 100, dtype=torch.uint8)
    copy = in_huge_pages(tensor)
    assert copy.shape == tensor.shape
    assert copy.dtype == torch.uint8


@pytest.mark.skipif(sys.platform != "linux", reason="reads what is mapped in /proc")
def test_memory_is_freed_with_the_tensors_in_it() -> None:
    def resident() -> int:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) << 10

    source = torch.ones(1 << 20, dtype=torch.uint8)
    before = resident()
    copies = [in_huge_pages(source) for _ in range(300)]
    assert resident() - before > 250 << 20
    del copies
    gc.collect()
    assert resident() - before < 100 << 20
