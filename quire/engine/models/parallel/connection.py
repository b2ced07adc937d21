"""Connections among ranks, over torch.distributed's backends: NCCL on GPUs, Gloo on CPUs."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

_CONNECT_TIMEOUT = timedelta(minutes=1)
_TIMEOUT = timedelta(minutes=10)  # of a transfer; a rank that has ended is noticed at once


def connect(store: Path, rank: int, size: int, device: torch.device) -> Any:
    """Connect to other ranks, which do the same; returns the backend.

    With NCCL the ranks are connected once the first transfer has been submitted.

    Args:
        store: file in which the ranks find each other; not there at first.
        rank: index of this rank among them.
        size: their number.
        device: device of all tensors.
    """
    dist = torch_distributed()
    files = dist.FileStore(str(store), size)
    files.set_timeout(_CONNECT_TIMEOUT)
    if device.type == "cuda":
        # All ranks are on this machine. NCCL would listen on its other addresses, which may not be reachable.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        # Else torch ends the process when it notices that a rank has ended, and with it the server.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        backend = dist.ProcessGroupNCCL(files, rank, size, options)
        backend._set_sequence_number_for_group()
        return backend
    options = dist.ProcessGroupGloo._Options()
    options._timeout = _CONNECT_TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    backend = dist.ProcessGroupGloo(files, rank, size, options)
    backend._set_default_timeout(_TIMEOUT)
    return backend


def disconnect(backend: Any, device: torch.device) -> None:
    """Disconnect without waiting for the other ranks, which may have ended."""
    if device.type == "cuda":
        backend.abort()  # the destructor would wait for kernels that wait for another rank


def torch_distributed() -> Any:
    """The module, whose import takes a tenth of a second that one rank does not need; its stubs lack the backends."""
    return importlib.import_module("torch.distributed")
