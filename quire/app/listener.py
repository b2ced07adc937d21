"""Listener: accepts many connections of the server's sockets at once."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import uvicorn

from quire.app.http_protocol import probe_detector
from quire.workers.eager import run_eagerly

logger = logging.getLogger("quire")
_ACCEPTING = _OPENING = 0.002  # seconds in one iteration of the event loop
_PROBES_FIRST = 3  # probes that are opened before another connection is
_LEAST_ROOM = 64  # connections that may be accepted while none may be added: others are closed for them
_START = 512  # bytes of a request that are looked at
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE = 1.0  # seconds, when the system has no file for another connection


class Listener:
    """Accept the connections of sockets that listen, and open them: many in each iteration of the event loop.

    The event loop's own servers accept one. A probe that connects after thousands of clients would wait for as many
    iterations, in each of which one of their requests begins. Here it is soon accepted, as that takes a tenth of the
    time of opening a connection, and opened before clients that have sent something else: three probes, then one of
    these. TLS hides what a client sends, so there a probe does not overtake.

    Attributes:
        sockets: those that listen.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        make_protocol: Callable[[], asyncio.Protocol],
        room: Callable[[], int],
        is_probe: Callable[[bytes], object],
    ) -> None:
        """Accept from now on. To be called on the event loop.

        Args:
            sockets: that listen.
            make_protocol: makes the protocol of a connection.
            room: how many connections may be accepted and not open yet.
            is_probe: whether these are the first bytes of a probe.
        """
        self.sockets = tuple(sockets)
        self._make_protocol = make_protocol
        self._room = room
        self._is_probe = is_probe
        self._loop = asyncio.get_running_loop()
        self._probes: deque[socket.socket] = deque()  # accepted, not open
        self._ordinary: deque[socket.socket] = deque()
        self._opens = False  # opening is scheduled
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        for listening in self.sockets:
            listening.setblocking(False)
            self._resume(listening)

    def close(self) -> None:
        """Accept no more, and close the sockets and the connections that are not open yet."""
        if self._closed:
            return
        self._closed = True
        for listening in self.sockets:
            self._loop.remove_reader(listening)
            listening.close()
        for waiting in (self._probes, self._ordinary):
            while waiting:
                waiting.popleft().close()

    async def wait_closed(self) -> None:
        """Return at once: it is closed."""

    def _resume(self, listening: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(listening, self._accept_some, listening)

    def _accept_some(self, listening: socket.socket) -> None:
        end = time.monotonic() + _ACCEPTING
        while len(self._probes) + len(self._ordinary) < max(_LEAST_ROOM, self._room()):
            try:
                connection, _ = listening.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:  # otherwise there is no other connection, or this one has failed
                    logger.error("no connections are accepted for %g s: %s", _PAUSE, error)
                    self._loop.remove_reader(listening)
                    self._loop.call_later(_PAUSE, self._resume, listening)
                break
            connection.setblocking(False)
            (self._probes if self._is_probe(_sent(connection)) else self._ordinary).append(connection)
            if time.monotonic() > end:
                break
        if not self._opens:
            self._open_some()

    def _open_some(self) -> None:
        end = time.monotonic() + _OPENING
        self._opens = True
        while self._probes or self._ordinary:
            for waiting in (*[self._probes] * _PROBES_FIRST, self._ordinary):
                if waiting:
                    self._open(waiting.popleft())
            if time.monotonic() > end:
                self._loop.call_soon(self._open_some)
                return
        self._opens = False

    def _open(self, connection: socket.socket) -> None:
        try:
            opening = run_eagerly(self._loop.connect_accepted_socket(self._make_protocol, connection))
        except OSError as error:  # it has failed meanwhile
            logger.debug("a connection was not opened: %s", error)
            connection.close()
            return
        except Exception:  # else those that wait behind it would never be opened
            logger.exception("a connection could not be opened")
            connection.close()
            return
        if opening is not None:
            self._tasks.add(opening)
            opening.add_done_callback(self._tasks.discard)


def accept_connections(server: uvicorn.Server, sockets: Sequence[socket.socket], room: Callable[[], int]) -> None:
    """Let a server that has started without sockets accept the connections of these, which listen."""
    kind: Callable[..., asyncio.Protocol] = server.config.http_protocol_class
    make_protocol = partial(
        kind, config=server.config, server_state=server.server_state, app_state=server.lifespan.state
    )
    is_probe = probe_detector(server.config.root_path)
    server.servers = [Listener(sockets, make_protocol, room, is_probe)]  # type: ignore[list-item]  # with what it calls


def _sent(connection: socket.socket) -> bytes:
    """The first bytes that a client has sent. They can still be received."""
    try:
        return connection.recv(_START, socket.MSG_PEEK)
    except OSError:  # nothing has arrived, or the client has gone
        return b""
