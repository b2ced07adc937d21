"""Finds the device that `--device` names."""

from __future__ import annotations

import logging
from typing import Literal, assert_never

from quire.engine.execution.devices.cpu import CpuDevice
from quire.engine.execution.devices.device import Device
from quire.engine.execution.devices.reference import ReferenceDevice
from quire.kernels import native

logger = logging.getLogger(__name__)


def find_device(name: Literal["cpu", "reference"]) -> Device:
    """Return the device with this name; for "cpu" without compiled kernels the reference device."""
    match name:
        case "reference":
            return ReferenceDevice()
        case "cpu":
            if native.instructions() is not None:
                return CpuDevice()
            logger.warning("compiled kernels are not installed; falling back to PyTorch, which is several times slower")
            return ReferenceDevice()
    assert_never(name)
