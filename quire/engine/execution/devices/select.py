"""Finds the device that `--device` names."""

from __future__ import annotations

import logging
from typing import Literal

from quire.engine.execution.devices.cpu import CpuDevice
from quire.engine.execution.devices.device import Device
from quire.engine.execution.devices.reference import ReferenceDevice
from quire.kernels import native

logger = logging.getLogger(__name__)


def find_device(name: Literal["cpu", "reference"]) -> Device:
    """The device of a name; without compiled kernels "cpu" is the reference device as well."""
    if name == "cpu" and native.instructions() is not None:
        return CpuDevice()
    if name == "cpu":
        logger.warning("compiled kernels are not installed; falling back to PyTorch, which is several times slower")
    return ReferenceDevice()
