"""Finds the device that `--device` names."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Literal, assert_never

import torch

from quire.engine.execution.devices.device import Device
from quire.engine.execution.devices.host import CpuDevice, ReferenceDevice
from quire.engine.models.errors import UnavailableDevice
from quire.kernels import native

logger = logging.getLogger(__name__)


def find_device(name: Literal["auto", "cpu", "cuda", "reference"]) -> Device:
    """Return the device with this name.

    "auto" is "cuda" if it is available, else "cpu"; for "cpu" without compiled kernels it is the reference device.

    Raises:
        UnavailableDevice: "cuda" is not available.
    """
    match name:
        case "reference":
            return ReferenceDevice()
        case "auto" if _missing_for_cuda() is None:
            return _cuda()
        case "cpu" | "auto":
            if native.instructions() is not None:
                return CpuDevice()
            logger.warning("compiled kernels are not installed; falling back to PyTorch, which is several times slower")
            return ReferenceDevice()
        case "cuda":
            if (missing := _missing_for_cuda()) is not None:
                raise UnavailableDevice(f"--device cuda is not available: {missing}")
            return _cuda()
    assert_never(name)


def uses_gpu(name: Literal["auto", "cpu", "cuda", "reference"]) -> bool:
    """Whether `find_device` returns a GPU, or reports that there is none."""
    return name == "cuda" or (name == "auto" and _missing_for_cuda() is None)


def _missing_for_cuda() -> str | None:
    """What a CUDA device lacks here; None if there is one."""
    if torch.version.cuda is None:
        return "this installation of PyTorch is for CPUs; install one with CUDA"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device; check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install quire[gpu]"
    return None


def _cuda() -> Device:
    from quire.engine.execution.devices.triton import TritonDevice  # noqa: PLC0415 triton is not installed for CPUs

    return TritonDevice(torch.device("cuda", torch.cuda.current_device()))


def visible_gpus() -> list[str]:
    """Return the GPUs that this process sees, in the words of CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name.strip() for name in named.split(",")][:count] if named else [str(index) for index in range(count)]
