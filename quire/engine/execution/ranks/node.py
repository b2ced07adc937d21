"""Node: starts the ranks of a machine other than that of node 0, and ends with node 0."""

from __future__ import annotations

import logging
import multiprocessing.connection
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from quire.engine.client.errors import MalformedMessage
from quire.engine.execution.ranks.errors import NodesMissing, RankDied
from quire.engine.execution.ranks.messages import RankChannel
from quire.engine.execution.ranks.node_messages import End, Join, JoinRank, RankEnded, Refused, ToNode, Welcome
from quire.engine.execution.ranks.nodes import MAX_JOIN
from quire.engine.execution.ranks.sockets import connect
from quire.engine.execution.ranks.workers import Launcher, RankEntry, RankHandle, rank_process
from quire.engine.models.distributed.rendezvous import TcpRendezvous

logger = logging.getLogger(__name__)
_ATTEMPT_SECONDS, _PAUSE = 5.0, 0.3  # of a connection, and between two
_LOOK_EVERY = 0.2  # seconds between calls of `is_over`
_LAST_WORDS = 15.0  # seconds in which node 0 has noticed that a rank has ended


class Node:
    """The connection to node 0."""

    def __init__(self, number: int, ranks: range, host: str, port: int, address: str | None) -> None:
        """A node that has not joined yet.

        Args:
            number: its --node-rank.
            ranks: its ranks.
            host: of node 0.
            port: where that listens.
            address: of this machine, where its ranks listen; None: that from which node 0 is reached.
        """
        self._number = number
        self._ranks = ranks
        self._host = host
        self._port = port
        self._address = address
        self._channel: RankChannel | None = None
        self._ranks_left: dict[int, Any] = {}  # sentinels of processes that run, with their ranks
        self._handles: dict[int, RankHandle] = {}

    def join(self, facts: Mapping[str, str], seconds: float) -> Welcome:
        """Join node 0, and wait for it if it is not there yet.

        Args:
            facts: what has to be the same on all nodes.
            seconds: until it must be there.

        Raises:
            NodesMissing: it has not come in time, or this node does not fit.
        """
        end = time.monotonic() + seconds
        connection, address = self._connect(end, seconds)
        self._address = self._address or address
        self._channel = channel = RankChannel(connection, ToNode, MAX_JOIN)
        try:
            channel.send(Join(self._number, dict(facts)))
            if not connection.poll(max(0.0, end - time.monotonic())):
                raise NodesMissing(f"node 0 at {self._where} did not answer within {seconds:g} s")
            message = channel.receive()
        except (EOFError, OSError, MalformedMessage) as error:
            raise NodesMissing(f"at {self._where} is no node 0 that waits for this one: {error}") from error
        match message:
            case Refused(error=reason):
                raise NodesMissing(f"node 0 at {self._where} refuses this node: {reason}")
            case Welcome():
                return message
            case _:
                raise NodesMissing(f"node 0 at {self._where} has ended before all nodes had come")

    def start(self, entry: RankEntry, welcome: Welcome, launch: Launcher | None = None) -> None:
        """Start the ranks.

        Args:
            entry: runs one.
            welcome: that of node 0.
            launch: starts one; None: in processes that have the GPUs of this machine.

        Raises:
            NodesMissing: node 0 has gone.
        """
        assert self._address is not None
        rendezvous = TcpRendezvous(self._host, welcome.store_port, self._address)
        launch = launch or partial(rank_process, first=self._ranks.start)
        for rank in self._ranks:
            connection = self._connection_of_rank(rank, welcome.ticket)
            handle = launch(entry, rank, rendezvous, connection)
            self._handles[rank] = handle
            if isinstance(handle, BaseProcess):
                self._ranks_left[handle.sentinel] = rank

    def run(self, is_over: Callable[[], bool]) -> None:
        """Wait until node 0 lets all ranks end, or until `is_over`; then end those of this node.

        Raises:
            RankDied: another node or a rank has ended unexpectedly; the message names it.
        """
        assert self._channel is not None
        failed, latest = "", float("inf")
        try:
            while not is_over() and time.monotonic() < latest:
                ready = multiprocessing.connection.wait([self._channel.connection, *self._ranks_left], _LOOK_EVERY)
                for sentinel in [sentinel for sentinel in ready if sentinel in self._ranks_left]:
                    failed = self._note_end(self._ranks_left.pop(sentinel)) or failed
                    latest = min(latest, time.monotonic() + _LAST_WORDS)  # node 0 knows it by then
                if self._channel.connection in ready:
                    self._hear(failed)
                    return
            if failed and not is_over():
                raise RankDied(failed)
        finally:
            for handle in self._handles.values():
                handle.kill()

    def close(self) -> None:
        """Disconnect; ranks that run have been told to end, or notice it."""
        if self._channel is not None:
            self._channel.close()

    def _hear(self, failed: str) -> None:
        """Receive the last message of node 0. `failed`: what has ended here before."""
        assert self._channel is not None
        try:
            message = self._channel.receive()
        except (EOFError, OSError, MalformedMessage) as error:
            raise RankDied(failed or f"node 0 at {self._where} has ended") from error
        reason = message.error if isinstance(message, End) else f"{type(message).__name__} arrived"
        if failed or reason:
            raise RankDied(failed or f"node 0 at {self._where} has stopped: {reason}")
        for handle in self._handles.values():
            handle.join(1.0)

    def _note_end(self, rank: int) -> str:
        """Tell node 0 that a process has ended; returns why that is an error, if it is one."""
        assert self._channel is not None
        handle = self._handles[rank]
        handle.join()
        exitcode = handle.exitcode
        if not exitcode:  # it was told to, or has told the core why
            return ""
        error = f"rank {rank} of this node has stopped: its process ended with exit code {exitcode}"
        logger.error("%s", error)
        try:
            self._channel.send(RankEnded(rank, exitcode))
        except OSError:
            logger.debug("node 0 had ended before")
        return error

    def _connect(self, end: float, seconds: float) -> tuple[Connection, str]:
        logger.info("node %d joins node 0 at %s", self._number, self._where)
        while True:
            try:
                return connect(self._host, self._port, self._address, _ATTEMPT_SECONDS)
            except OSError as error:
                if time.monotonic() > end:
                    raise NodesMissing(
                        f"node 0 was not at {self._where} (--master-addr, --master-port) within {seconds:g} s "
                        f"(--distributed-timeout-seconds): {error.strerror or error}"
                    ) from error
            time.sleep(_PAUSE)

    def _connection_of_rank(self, rank: int, ticket: bytes) -> Connection:
        try:
            connection, _ = connect(self._host, self._port, self._address, _ATTEMPT_SECONDS)
            RankChannel(connection, ToNode, MAX_JOIN).send(JoinRank(rank, ticket))
        except OSError as error:
            raise NodesMissing(f"node 0 at {self._where} has gone: {error.strerror or error}") from error
        return connection

    @property
    def _where(self) -> str:
        return f"{self._host}:{self._port}"
