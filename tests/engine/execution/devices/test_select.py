"""The names of devices, and what is missing where there is no GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from quire.engine.execution.devices.select import find_device
from quire.engine.models.errors import UnavailableDevice

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@no_gpu
def test_auto_is_the_cpu_without_a_gpu() -> None:
    assert find_device("auto").name == find_device("cpu").name


@pytest.mark.gpu
def test_auto_is_the_gpu_where_there_is_one() -> None:
    assert find_device("auto").name == "cuda"


@no_gpu
def test_cuda_is_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        UnavailableDevice, match="--device cuda is not available: this installation of PyTorch is for CPUs"
    ):
        find_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(UnavailableDevice, match="PyTorch finds no CUDA device; check the driver"):
        find_device("cuda")


def test_cuda_is_refused_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UnavailableDevice, match=r"triton is not installed; install quire\[gpu\]"):
        find_device("cuda")
    assert find_device("auto").name == find_device("cpu").name
