"""RankConnection: a connection among ranks, over torch.distributed's backends: NCCL on GPUs, Gloo on CPUs."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch

from quire.engine.models.distributed.rendezvous import CONNECT_TIMEOUT, Rendezvous, torch_distributed

_TIMEOUT = timedelta(minutes=10)  # of a transfer; a rank that has ended is noticed at once


class RankConnection:
    """A connection among some ranks, over which subclasses transfer tensors.

    Attributes:
        rank: index of this rank among them.
        size: their number.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        """A connection that is not made yet. `name`: the same for its ranks, and no other connection's."""
        self.rank = rank
        self.size = size
        self._name = name
        self._backend: Any = None
        self._device = torch.device("cpu")
        self._sockets: list[_Socket] = []  # Gloo's, if ranks are on several machines

    def abort(self) -> None:
        """End the transfers that other threads wait for, with an error."""
        if self._backend is not None:
            self._backend.abort()
        for connected in self._sockets:  # Gloo's `abort` ends no transfer
            connected.shut()

    def close(self) -> None:
        """Disconnect without waiting for the other ranks, which may have ended."""
        if self._device.type == "cuda":
            self.abort()  # the destructor would wait for kernels that wait for another rank
        self._backend = None
        self._sockets = []

    def _connect(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """Connect to the other ranks, which do the same.

        With NCCL the ranks are connected once the first transfer has been submitted.

        Args:
            rendezvous: where all ranks find each other.
            device: device of all tensors.
        """
        store = rendezvous.store(self._name, self.size)
        self._device = device
        if device.type == "cuda":
            self._backend = _nccl(store, self.rank, self.size, rendezvous)
            return
        before = _connected_sockets() if rendezvous.crosses_machines else frozenset[_Socket]()
        self._backend = _gloo(store, self.rank, self.size, rendezvous)
        if rendezvous.crosses_machines:
            self._sockets = [*_connected_sockets() - before]

    def _wait(self, transfer: Any) -> None:
        """Wait for a transfer between two ranks."""
        if self._device.type == "cuda":
            transfer.wait()  # with a timeout it would wait for the device as well
        else:
            transfer.wait(_TIMEOUT)  # else Gloo takes that for connecting


def _nccl(store: Any, rank: int, size: int, rendezvous: Rendezvous) -> Any:
    distributed = torch_distributed()
    # NCCL would listen at other addresses of this machine, which the other ranks may not reach.
    if rendezvous.interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", rendezvous.interface)
    # Else torch ends the process when it notices that a rank has ended, and with it the server.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    backend = distributed.ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


def _gloo(store: Any, rank: int, size: int, rendezvous: Rendezvous) -> Any:
    distributed = torch_distributed()
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = CONNECT_TIMEOUT
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=rendezvous.address)]
    backend = distributed.ProcessGroupGloo(store, rank, size, options)
    backend._set_default_timeout(_TIMEOUT)
    return backend


@dataclass(frozen=True, slots=True)
class _Socket:
    """A socket that belongs to a library. `inode`: tells it from one that gets the same file descriptor later."""

    fd: int
    inode: int

    def shut(self) -> None:
        """End what waits for its peer."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.fd)) as copy:
            if os.fstat(copy.fileno()).st_ino == self.inode:
                copy.shutdown(socket.SHUT_RDWR)


def _connected_sockets() -> frozenset[_Socket]:
    """Those of this process's TCP connections."""
    sockets = set()
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr:
            with suppress(OSError):  # another thread has closed it
                sockets.add(_Socket(connection.fd, os.fstat(connection.fd).st_ino))
    return frozenset(sockets)
