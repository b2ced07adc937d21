"""Rendezvous: where ranks find each other before they connect, in a folder of one machine or at a node's address."""

from __future__ import annotations

import importlib
import shutil
import socket
import tempfile
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import psutil

CONNECT_TIMEOUT = timedelta(minutes=1)
_LOOPBACK, _LOOPBACK_INTERFACE = "127.0.0.1", "lo"
_STORE_BACKLOG = 1024


class Rendezvous(Protocol):
    """Where ranks find each other. It can be sent to their processes.

    Attributes:
        address: of this machine, where its ranks listen for others.
        crosses_machines: whether the other rank of a connection may be on another machine.
    """

    @property
    def address(self) -> str:
        """See above."""

    @property
    def crosses_machines(self) -> bool:
        """See above."""

    @property
    def interface(self) -> str:
        """The network interface that has the address; empty if that cannot be told."""

    def store(self, name: str, size: int) -> Any:
        """Return the store of torch.distributed by which the `size` ranks of a connection find each other.

        `name`: that of the connection, the same for its ranks, and no other connection's.
        """

    def remove(self) -> None:
        """Delete what is left of it on this machine."""


@dataclass(frozen=True, slots=True)
class FileRendezvous:
    """A folder, for ranks that are all on this machine. A file is made in it for each connection.

    The first rank that connects makes it: only processes that know it, and delete it at their end, leave it behind.
    """

    folder: Path
    address: str = _LOOPBACK
    interface: str = _LOOPBACK_INTERFACE
    crosses_machines: bool = False

    def store(self, name: str, size: int) -> Any:
        """See `Rendezvous`."""
        self.folder.mkdir(0o700, exist_ok=True)
        files = torch_distributed().FileStore(str(self.folder / name), size)
        files.set_timeout(CONNECT_TIMEOUT)
        return files

    @classmethod
    def new(cls) -> FileRendezvous:
        """Return a folder that nobody else uses, among the temporary ones."""
        return cls(Path(tempfile.gettempdir()) / f"quire-ranks-{uuid.uuid4().hex}")

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class TcpRendezvous:
    """A TCPStore at an address of node 0, for ranks on several machines.

    Attributes:
        host: address of the store.
        port: its port.
        address: see `Rendezvous`.
    """

    host: str
    port: int
    address: str
    crosses_machines: bool = True

    @property
    def interface(self) -> str:
        """See `Rendezvous`."""
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address.partition("%")[0] == self.address for address in addresses):
                return name
        return ""

    def store(self, name: str, size: int) -> Any:
        """See `Rendezvous`."""
        distributed = torch_distributed()
        client = distributed.TCPStore(
            self.host, self.port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT
        )
        return distributed.PrefixStore(f"{name}-{size}", client)

    def remove(self) -> None:
        """Nothing is left of it."""


class StoreServer:
    """The TCPStore of node 0, at one address only; torch's own socket would listen at all addresses of the machine.

    Attributes:
        port: where it listens.
    """

    def __init__(self, family: int, address: tuple[Any, ...]) -> None:
        """Listen at the host of an address, on a free port.

        Raises:
            OSError: that is not possible.
        """
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((address[0], 0, *address[2:]))
            listener.listen(_STORE_BACKLOG)
            self.port: int = listener.getsockname()[1]
            self._store: Any = torch_distributed().TCPStore(
                address[0],
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=CONNECT_TIMEOUT,
                master_listen_fd=listener.detach(),
            )

    def close(self) -> None:
        """Stop to listen."""
        self._store = None


def torch_distributed() -> Any:
    """The module, whose import takes a tenth of a second that one rank does not need; its stubs lack the backends."""
    return importlib.import_module("torch.distributed")
