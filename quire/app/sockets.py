"""The sockets on which the server listens, bound before models are loaded."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from quire.config.command import ConfigError
from quire.config.options import ServerOptions


@contextmanager
def bind_sockets(settings: ServerOptions) -> Iterator[list[socket.socket]]:
    """Sockets bound to the server's address. They do not listen until models are loaded, so that probes fail.

    Raises:
        ConfigError: the port or path is in use, or the host is not an address of this machine.
    """
    with ExitStack() as stack:
        try:
            if settings.uds is not None:
                sockets = [stack.enter_context(_bind_path(settings.uds))]
                stack.callback(settings.uds.unlink, missing_ok=True)
            else:
                sockets = [stack.enter_context(bound) for bound in _bind(settings.host, settings.port)]
        except (OSError, UnicodeError, ValueError) as error:  # of a host that cannot be a name
            raise listen_error(settings, error) from error
        yield sockets


@contextmanager
def bind_shared_sockets(settings: ServerOptions, count: int) -> Iterator[list[list[socket.socket]]]:
    """Sockets bound to the server's address as often as there are processes, among which the system divides clients.

    Whoever holds the sockets of a process that has died keeps the connections that nobody has accepted there. Other
    servers of the same user could join: the port must have been free before.

    Raises:
        ConfigError: see `bind_sockets`.
    """
    with ExitStack() as stack:
        with bind_sockets(settings) as taken:
            port = taken[0].getsockname()[1]
        groups = []
        try:
            for _ in range(count):
                bound = _bind(settings.host, port, shared=True)
                groups.append([stack.enter_context(made) for made in bound])
        except OSError as error:
            raise listen_error(settings, error) from error
        yield groups


def _bind(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """One socket for each address of the host name. `shared`: others may be bound there as well."""
    addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        if port == 0 and sockets:  # the free port of the first address
            address = (address[0], sockets[0].getsockname()[1], *address[2:])
        try:
            made = socket.socket(family, kind, protocol)
            if shared:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sockets.append(_bind_one(made, address))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for bound in sockets:
                    bound.close()
                raise
            missing = error  # the name may have an IPv6 address on a system without IPv6
    if not sockets and missing is not None:
        raise missing
    return sockets


def _bind_path(path: Path) -> socket.socket:
    """A Unix domain socket, in place of one that a server has left behind."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and made.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
        made.close()
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.bind(str(path))
    except (OSError, ValueError):
        made.close()
        raise
    return made


def _bind_one(made: socket.socket, address: tuple[Any, ...]) -> socket.socket:
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def listen_error(settings: ServerOptions, error: OSError | ValueError) -> ConfigError:
    """The error of an address on which the server cannot listen."""
    reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    if settings.uds is not None:
        return ConfigError(f"quire: cannot listen at --uds {settings.uds}: {reason}")
    return ConfigError(f"quire: cannot listen at --host {settings.host} --port {settings.port}: {reason}")
