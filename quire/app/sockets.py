"""The sockets on which the server listens: bound before models are loaded, and accepting many connections at once."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from quire.config.command import ConfigError
from quire.config.options import ServerOptions

logger = logging.getLogger("quire")
_ACCEPTED = 64  # connections of a socket in one iteration of the event loop
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE = 1.0  # seconds, when the system has no file for another connection


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


class Listener:
    """Accepts the connections of a socket that listens, many of them in each iteration of the event loop.

    The event loop's own servers accept one. A probe that connects after thousands of clients would wait for as many
    iterations, in each of which one of their requests begins.

    Attributes:
        sockets: the socket.
    """

    def __init__(self, listening: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Accept from now on. To be called on the event loop."""
        self.sockets = (listening,)
        self._socket = listening
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[Any]] = set()
        self._closed = False
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more, and close the socket."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket)
            self._socket.close()

    async def wait_closed(self) -> None:
        """Return at once: it is closed."""

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno not in _NO_ROOM:  # there is no other connection, or this one has failed
                    return
                logger.error("no connections are accepted for %g s: %s", _PAUSE, error)
                self._loop.remove_reader(self._socket)
                self._loop.call_later(_PAUSE, self._resume)
                return
            connection.setblocking(False)
            opening = self._loop.create_task(self._loop.connect_accepted_socket(self._make_protocol, connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket, self._accept)


def accept_connections(server: uvicorn.Server, sockets: Sequence[socket.socket]) -> None:
    """Let a server that has started without sockets accept the connections of these, which listen."""
    kind: Callable[..., asyncio.Protocol] = server.config.http_protocol_class
    make_protocol = partial(
        kind, config=server.config, server_state=server.server_state, app_state=server.lifespan.state
    )
    server.servers = [Listener(listening, make_protocol) for listening in sockets]  # type: ignore[misc]  # with what it calls


def _bind(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of the host name."""
    addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        if port == 0 and sockets:  # the free port of the first address
            address = (address[0], sockets[0].getsockname()[1], *address[2:])
        try:
            sockets.append(_bind_one(socket.socket(family, kind, protocol), address))
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
        return ConfigError(f"quire serve: cannot listen at --uds {settings.uds}: {reason}")
    return ConfigError(f"quire serve: cannot listen at --host {settings.host} --port {settings.port}: {reason}")
