"""RankConnection: a connection among ranks, over torch.distributed's backends: NCCL on GPUs, Gloo on CPUs."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

_CONNECT_TIMEOUT = timedelta(minutes=1)
_TIMEOUT = timedelta(minutes=10)  # of a transfer; a rank that has ended is noticed at once


class RankConnection:
    """A connection among some ranks, over which subclasses transfer tensors.

    Attributes:
        rank: index of this rank among them.
        size: their number.
    """

    def __init__(self, rank: int, size: int) -> None:
        """A connection that is not made yet."""
        self.rank = rank
        self.size = size
        self._backend: Any = None
        self._device = torch.device("cpu")

    def abort(self) -> None:
        """End the transfers that other threads wait for, with an error."""
        if self._backend is not None:
            self._backend.abort()

    def close(self) -> None:
        """Disconnect without waiting for the other ranks, which may have ended."""
        if self._device.type == "cuda":
            self.abort()  # the destructor would wait for kernels that wait for another rank
        self._backend = None

    def _connect(self, store: Path, device: torch.device) -> None:
        """Connect to the other ranks, which do the same.

        With NCCL the ranks are connected once the first transfer has been submitted.

        Args:
            store: file in which the ranks find each other; not there at first.
            device: device of all tensors.
        """
        self._backend = _backend(store, self.rank, self.size, device)
        self._device = device


def _backend(store: Path, rank: int, size: int, device: torch.device) -> Any:
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


def torch_distributed() -> Any:
    """The module, whose import takes a tenth of a second that one rank does not need; its stubs lack the backends."""
    return importlib.import_module("torch.distributed")
