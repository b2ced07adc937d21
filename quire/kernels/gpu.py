"""Which tensors the Triton kernels run on: those on CUDA devices, and within `interpreted()` all others.

This module does not import triton, which is not installed for CPUs. The modules of ``quire.kernels.triton`` do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

_FLOAT8 = (8, 9)  # compute capability of GPUs with products of float8
_INTERPRETER = "TRITON_INTERPRET"  # triton reads it when a kernel is defined


class _ThreadState(threading.local):
    interpreted = False


_thread = _ThreadState()


def supports(*tensors: Tensor) -> bool:
    """Whether Triton kernels run on the tensors: all on a CUDA device, or the thread is within `interpreted()`."""
    for tensor in tensors:  # not `all`, whose generator takes longer than the rest
        if not tensor.is_cuda:
            return _thread.interpreted
    return True


def runs_on(device: torch.device) -> bool:
    """Whether Triton kernels run on tensors of the device, see `supports`."""
    return device.type == "cuda" or (_thread.interpreted and device.type == "cpu")


def is_interpreted() -> bool:
    """Whether kernels that are defined now are run by Triton's interpreter, on the CPU."""
    return os.environ.get(_INTERPRETER) == "1"


def computes_float8(device: torch.device) -> bool:
    """Whether the kernels multiply float8 numbers there: on GPUs of compute capability 8.9 or more, or interpreted."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _FLOAT8
    return _thread.interpreted


@contextmanager
def interpreted() -> Iterator[None]:
    """Run the Triton kernels on CPU tensors in this thread: for tests, as Triton's interpreter is slow.

    The interpreter computes with numpy, which then does not warn of overflows, as GPUs do not.

    Raises:
        RuntimeError: TRITON_INTERPRET=1 was not set before the kernels were imported.
    """
    if not is_interpreted():
        raise RuntimeError(f"Triton kernels run on the CPU only if {_INTERPRETER}=1 is set before they are imported")
    before, _thread.interpreted = _thread.interpreted, True
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        _thread.interpreted = before
