"""TCP sockets between nodes: who is silent is noticed within seconds."""

from __future__ import annotations

import select
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

_SILENCE = 10_000  # milliseconds without an answer to what was sent
_IDLE, _INTERVAL, _PROBES = 3, 2, 3  # seconds until a first probe, and between those that follow it
_BACKLOG = 1024


def resolve(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """Return the family of a host's first address, and the address.

    Raises:
        OSError: the name is unknown.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, address


def listen(family: int, address: tuple[Any, ...]) -> socket.socket:
    """Return a socket that listens at one address.

    Raises:
        OSError: that is not possible.
    """
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def connect(host: str, port: int, source: str | None, seconds: float) -> tuple[Connection, str]:
    """Connect to a host.

    Args:
        host: its name or address.
        port: its port.
        source: address of this machine to connect from; None: the system chooses.
        seconds: until it must have answered.

    Returns:
        The connection, and this machine's address in it.

    Raises:
        OSError: that is not possible.
    """
    connected = socket.create_connection((host, port), seconds, None if source is None else (source, 0))
    connected.settimeout(None)
    address = str(connected.getsockname()[0])
    return connection_of(connected), address


def connection_of(connected: socket.socket) -> Connection:
    """Return the socket as a connection, which ends when the other machine is silent for some seconds."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE),
        ("TCP_KEEPINTVL", _INTERVAL),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", _SILENCE),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(connected.detach())


def limit_reading(connection: Connection, seconds: int) -> None:
    """Let a read fail that waits for so long in the middle of a message; 0: never."""
    with socket.socket(fileno=_copy(connection)) as copy:
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def shut(connection: Connection) -> None:
    """End a connection, also for a thread that waits for it."""
    with socket.socket(fileno=_copy(connection)) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def has_ended(connection: Connection, seconds: float = 0.0) -> bool:
    """Whether the other end is closed or silent, or gets so within some seconds."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    return bool(poll.poll(seconds * 1000))


def _copy(connection: Connection) -> int:
    return socket.dup(connection.fileno())
