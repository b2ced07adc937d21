"""All open connections: how many there may be, which is closed for a new one, and when deadlines are checked."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Protocol

from quire.app.arriving_bodies import ArrivingBodies
from quire.config.options import ConnectionOptions
from quire.workers.turns import ENDINGS, turns

logger = logging.getLogger("quire")
_RESERVE = 64  # connections beyond those with requests: to read the next requests, and for probes
_CHECKED = 256  # connections whose deadlines are checked in one iteration of the event loop
_OTHER_FILES = 256  # files and sockets besides connections: models, the database, tool servers


class Connection(Protocol):
    """The interface of connections in the table."""

    transport: asyncio.Transport

    def overdue(self) -> bool:
        """Return whether a deadline has passed. To be called regularly."""

    def end_overdue(self) -> None:
        """Close the connection, whose deadline has passed."""


class UnreadResponse:
    """Detect that a client does not read its response."""

    def __init__(self, table: Connections, transport: asyncio.Transport) -> None:
        self._table = table
        self._transport = transport
        self._unsent = 0
        self.read_at = table.clock  # when the client last read something, or had nothing to read

    def overdue(self) -> bool:
        """Return whether the client has not read for too long. To be called regularly."""
        now = self._table.clock
        unsent = self._transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent:
            self.read_at = now
        self._unsent = unsent
        return now > self.read_at + self._table.options.write_timeout


def reset(transport: asyncio.Transport) -> None:
    """Close a connection at once, and drop the data that the system has not sent yet."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class Connections:
    """The table of open connections.

    Requests that are being answered have places, as many as `limit`. All other connections, those of probes included,
    may be closed for a new one, so there is always room for another probe.

    The clock advances when deadlines are checked, by at most two intervals. So a client is not blamed for time in
    which the event loop was blocked.

    Attributes:
        limit: maximum number of requests that are answered at the same time.
        running: these requests; sessions on WebSockets are among them.
        bodies: bodies that are arriving.
        clock: seconds; compare with `deadline`.
        reading: connections without a complete request head, the oldest first.
        idle: connections without a request, the longest idle connection first.
    """

    def __init__(self, options: ConnectionOptions) -> None:
        self.options = options
        self.limit = _within_file_limit(options.limit_concurrency)
        self.running: set[object] = set()
        self.bodies = ArrivingBodies(int(options.max_total_body_size))
        self.clock = 0.0
        self.reading: dict[Connection, None] = {}
        self.idle: dict[Connection, None] = {}
        self._open: set[Connection] = set()
        timeouts = (options.header_timeout, options.body_timeout, options.write_timeout, options.timeout_keep_alive)
        self._interval = min(1.0, min(timeouts) / 4)
        self._unchecked: list[Connection] = []  # of the check that is under way
        self._ending: set[Connection] = set()  # found to be overdue
        self._checked_at: float | None = None  # None while no check is scheduled

    def __len__(self) -> int:
        return len(self._open)

    @property
    def room(self) -> int:
        """How many connections may be added before others are closed for them."""
        return self.limit + _RESERVE - len(self._open)

    def deadline(self, seconds: float) -> float:
        """The time on the clock in `seconds` from now."""
        return self.clock + seconds + self._interval

    def take_place(self, request: object) -> bool:
        """Count a request among those that are being answered, if there is a place."""
        if len(self.running) >= self.limit:
            return False
        self.running.add(request)
        return True

    def leave_place(self, request: object) -> None:
        """Give back the place of a request that has been answered."""
        self.running.discard(request)

    def add(self, connection: Connection) -> bool:
        """Add a new connection. If there are too many, an idle one or one without a place is closed.

        Returns False if there is no such connection.
        """
        if len(self._open) >= self.limit + _RESERVE and not self._close_one():
            return False
        self._open.add(connection)
        self.reading[connection] = None
        if self._checked_at is None:
            self._schedule(asyncio.get_running_loop())
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        self.reading.pop(connection, None)
        self.idle.pop(connection, None)

    def mark_reading(self, connection: Connection) -> None:
        """Note that a connection waits for the rest of a request head, or the answer to a request without a place."""
        self.idle.pop(connection, None)
        if connection in self._open:
            self.reading.setdefault(connection)

    def mark_idle(self, connection: Connection) -> None:
        """Note that a connection has no request, or that its request has been answered."""
        self.reading.pop(connection, None)
        self.idle.pop(connection, None)
        if connection in self._open:
            self.idle[connection] = None

    def mark_busy(self, connection: Connection) -> None:
        """Note that a connection has a request with a place."""
        self.reading.pop(connection, None)
        self.idle.pop(connection, None)

    def _close_one(self) -> bool:
        silent = (
            connection
            for connection in chain(self.idle, self.reading)
            if not connection.transport.get_write_buffer_size()
        )
        chosen = next(silent, None) or next(chain(self.idle, self.reading), None)  # others may be reading a response
        if chosen is None:
            return False
        self.remove(chosen)
        chosen.transport.abort()
        return True

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._checked_at = loop.time()
        loop.call_later(self._interval, self._check_all, loop)

    def _check_all(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._checked_at is not None
        self.clock += min(loop.time() - self._checked_at, 2 * self._interval)
        self._checked_at = None
        if self._open:
            self._schedule(loop)
        if not self._unchecked:
            self._unchecked = list(self._open)
            self._check_some(loop)

    def _check_some(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check some connections, then the others in the next iterations: 5,000 at once took up to 50 ms."""
        batch, self._unchecked = self._unchecked[:_CHECKED], self._unchecked[_CHECKED:]
        known = (connection for connection in batch if connection in self._open and connection not in self._ending)
        late = [connection for connection in known if connection.overdue()]
        self._ending.update(late)
        for connection in late:  # there may be thousands
            turns().run(ENDINGS, partial(self._end, connection))
        if self._unchecked:
            loop.call_soon(self._check_some, loop)

    def _end(self, connection: Connection) -> None:
        self._ending.discard(connection)
        if connection in self._open and connection.overdue():
            connection.end_overdue()


def _within_file_limit(requests: int) -> int:
    """The number of requests that the file limit allows, after it has been raised as far as necessary and possible."""
    needed = requests + _RESERVE + _OTHER_FILES
    files = _raise_file_limit(needed)
    if files >= needed:
        return requests
    allowed = max(1, files - min(_OTHER_FILES, files // 4) - _RESERVE)
    logger.warning(
        "--limit-concurrency is reduced from %d to %d: %d open files are needed, but the limit (ulimit -n) is %d",
        *(requests, allowed, needed, files),
    )
    return allowed


def _raise_file_limit(files: int) -> int:
    """Raise the soft limit of open files to `files`, at most to the hard limit. Returns the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return files
    if soft < files:
        raised = files if hard == resource.RLIM_INFINITY else min(files, hard)
        with suppress(ValueError, OSError):  # a system may allow less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            return raised
    return soft
