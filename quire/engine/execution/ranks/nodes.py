"""Nodes: the other machines whose ranks run a model together with those of node 0. Node 0 waits for them here."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import logging
import multiprocessing.connection
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from quire.engine.client.errors import MalformedMessage
from quire.engine.client.facts import differences
from quire.engine.execution.ranks.errors import NodesMissing
from quire.engine.execution.ranks.messages import MAX_REPLY, FromWorker, RankChannel
from quire.engine.execution.ranks.node_messages import (
    Choices,
    End,
    FromNode,
    Join,
    JoinRank,
    RankEnded,
    Refused,
    Welcome,
)
from quire.engine.execution.ranks.sockets import connection_of, has_ended, limit_reading, listen, resolve, shut
from quire.engine.models.distributed.rendezvous import StoreServer, TcpRendezvous

logger = logging.getLogger(__name__)
MAX_JOIN = 64 << 10  # bytes of a message between nodes
_LOOK_EVERY = 0.1  # seconds between calls of `poll`
_MAX_STRANGERS = 64  # connections that have not said what they are
_SILENT = 10.0  # seconds that one may take to say it
_HALF_MESSAGE = 2  # seconds that it may take in the middle of a message
_EXIT_SECONDS = 1.0  # until the exit code of a process is known


class RemoteRank:
    """A rank on another node. It is known by its connection alone."""

    def __init__(self, rank: int, node: JoinedNode, connection: Connection) -> None:
        self.rank = rank
        self.node = node
        self.channel = RankChannel(connection, FromWorker, MAX_REPLY)

    @property
    def exitcode(self) -> int | None:
        """Exit code of its process; None if the node has not told it."""
        return self.node.exit_code(self.rank)

    def join(self, timeout: float | None = None) -> None:
        """Wait until its connection has ended."""
        if not self.channel.connection.closed:
            has_ended(self.channel.connection, 0.0 if timeout is None else timeout)

    def is_alive(self) -> bool:
        """Whether its connection has not ended."""
        return not self.channel.connection.closed and not has_ended(self.channel.connection)

    def kill(self) -> None:
        """End its connection, by which it ends."""
        with suppress(OSError):
            shut(self.channel.connection)


@dataclass(slots=True)
class JoinedNode:
    """A node that has joined.

    Attributes:
        node: its --node-rank.
        address: from which it has come.
        channel: to the process that starts its ranks.
        ranks: connections of its ranks.
    """

    node: int
    address: str
    channel: RankChannel
    ranks: dict[int, Connection] = field(default_factory=dict)
    _exits: dict[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"node {self.node} ({self.address})"

    def exit_code(self, rank: int) -> int | None:
        """The exit code of a rank's process, for which this waits a moment; None if the node does not tell it."""
        end = time.monotonic() + _EXIT_SECONDS
        with suppress(EOFError, OSError, MalformedMessage):
            while rank not in self._exits and self.channel.connection.poll(max(0.0, end - time.monotonic())):
                message = self.channel.receive()
                if isinstance(message, RankEnded):
                    self._exits[message.rank] = message.exitcode
        return self._exits.get(rank)

    def end(self, error: str) -> None:
        """Let it end. `error`: why; empty: node 0 was told to."""
        with suppress(OSError):
            self.channel.send(End(error))
        self.channel.close()


class NodeListener:
    """Wait at node 0 for the other nodes. A context manager, which listens inside its block.

    Attributes:
        rendezvous: where all ranks find each other.
        store: its server, which the caller closes.
    """

    def __init__(self, host: str, port: int, address: str | None, ranks: Sequence[range]) -> None:
        """Listen.

        Args:
            host: the address to listen at, or a name of it.
            port: the port.
            address: of this machine, where its ranks listen; None: that of `host`.
            ranks: those of each node.

        Raises:
            NodesMissing: that is not possible.
        """
        self._ranks = ranks
        self._joined: dict[int, JoinedNode] = {}
        self._strangers: dict[Connection, tuple[str, float]] = {}  # with their address, and when they have to go
        self._ticket = secrets.token_bytes(16)
        try:
            family, bound = resolve(host, port)
            if ipaddress.ip_address(bound[0]).is_unspecified:
                raise OSError(errno.EADDRNOTAVAIL, "it stands for all addresses, but other nodes need one of them")
            self._listener = listen(family, bound)
            self.store = StoreServer(family, bound)
        except OSError as error:
            reason = error.strerror or str(error)
            raise NodesMissing(
                f"node 0 cannot listen at --master-addr {host} --master-port {port}, which must be an address of its "
                f"machine: {reason}"
            ) from error
        self._where = f"{bound[0]}:{port}"
        self.rendezvous = TcpRendezvous(bound[0], self.store.port, address or bound[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop to listen; after an error let all nodes end that have come."""
        self._listener.close()
        for stranger in self._strangers:
            stranger.close()
        if error is not None:
            for node in self._joined.values():
                self._leave(node, str(error))
            self.store.close()

    def wait(
        self, facts: Mapping[str, str], choices: Choices, seconds: float, poll: Callable[[], None]
    ) -> list[JoinedNode]:
        """Wait until all nodes have come, with all their ranks.

        Args:
            facts: what has to be the same on all nodes.
            choices: for the nodes that come.
            seconds: until they must be there.
            poll: is called meanwhile.

        Raises:
            NodesMissing: one has not come in time, or does not fit.
        """
        welcome = Welcome(self.store.port, self._ticket, choices)
        end = time.monotonic() + seconds
        logger.info("waiting for %s at %s", _listed(self._missing()), self._where)
        while missing := self._missing():
            poll()
            now = time.monotonic()
            if now > end:
                raise NodesMissing(
                    f"{_listed(missing)} of {len(self._ranks)} did not come to {self._where} within {seconds:g} s "
                    "(--distributed-timeout-seconds)"
                )
            for connection in [*self._strangers]:
                if now > self._strangers[connection][1]:
                    self._drop(connection, "it is silent")
            controls = {node.channel.connection: node for node in self._joined.values()}
            for ready in multiprocessing.connection.wait([self._listener, *self._strangers, *controls], _LOOK_EVERY):
                if ready is self._listener:
                    self._accept()
                elif ready in controls:
                    self._forget(controls[ready])  # it has nothing to say yet
                elif ready in self._strangers:
                    self._hear(ready, facts, welcome)
        return [self._joined[node] for node in sorted(self._joined)]

    def _missing(self) -> list[int]:
        """The nodes that have not come, or not with all of their ranks."""
        return [
            node
            for node, ranks in enumerate(self._ranks)
            if node and (node not in self._joined or len(self._joined[node].ranks) < len(ranks))
        ]

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except OSError:  # it has gone again
            return
        accepted.setblocking(True)
        if len(self._strangers) >= _MAX_STRANGERS:
            accepted.close()
            return
        connection = connection_of(accepted)
        limit_reading(connection, _HALF_MESSAGE)
        self._strangers[connection] = (str(address[0]), time.monotonic() + _SILENT)

    def _hear(self, connection: Connection, facts: Mapping[str, str], welcome: Welcome) -> None:
        """Receive what a connection is."""
        channel = RankChannel(connection, FromNode, MAX_JOIN)
        try:
            message = channel.receive()
        except (EOFError, OSError, MalformedMessage) as error:
            self._drop(connection, str(error) or "it has ended")
            return
        match message:
            case Join():
                self._join(channel, message, facts, welcome)
            case JoinRank(rank=rank) if hmac.compare_digest(message.ticket, self._ticket):
                self._join_rank(connection, rank)
            case _:
                self._drop(connection, "it is no node of this server")

    def _join(self, channel: RankChannel, join: Join, facts: Mapping[str, str], welcome: Welcome) -> None:
        address, _ = self._strangers.pop(channel.connection)
        limit_reading(channel.connection, 0)
        node = JoinedNode(join.node, address, channel)
        error = "; ".join(
            f"{name} is {theirs} on node {join.node} and {ours} on node 0"
            for name, theirs, ours in differences(join.facts, facts)
        )
        if error:
            self._refuse(node, error)
            raise NodesMissing(f"{node} does not fit: {error}")
        if not 0 < join.node < len(self._ranks):
            self._refuse(node, f"there are the nodes 0 to {len(self._ranks) - 1}, and node 0 has come")
        elif join.node in self._joined:
            self._refuse(node, f"{self._joined[join.node]} has come already")
        else:
            self._joined[join.node] = node
            with suppress(OSError):  # it has gone again, which `wait` notices
                channel.send(welcome)

    def _join_rank(self, connection: Connection, rank: int) -> None:
        for node in self._joined.values():
            if rank in self._ranks[node.node] and rank not in node.ranks:
                del self._strangers[connection]
                limit_reading(connection, 0)
                node.ranks[rank] = connection
                if len(node.ranks) == len(self._ranks[node.node]):
                    logger.info("%s has joined", node)
                return
        self._drop(connection, f"there is no place for rank {rank}")

    def _refuse(self, node: JoinedNode, error: str) -> None:
        logger.warning("%s is refused: %s", node, error)
        with suppress(OSError):
            node.channel.send(Refused(error))
        node.channel.close()

    def _forget(self, node: JoinedNode) -> None:
        """Wait again for a node that has ended before all had come: it may be started again."""
        logger.warning("%s has ended before all nodes had come", node)
        self._leave(node, "")
        del self._joined[node.node]

    def _leave(self, node: JoinedNode, error: str) -> None:
        for connection in node.ranks.values():
            connection.close()
        node.end(error)

    def _drop(self, connection: Connection, reason: str) -> None:
        address, _ = self._strangers.pop(connection)
        logger.warning("a connection of %s to --master-port was closed: %s", address, reason)
        connection.close()


def remote_ranks(nodes: Sequence[JoinedNode]) -> Iterator[RemoteRank]:
    """Yield the ranks of nodes, in order."""
    for node in nodes:
        for rank in sorted(node.ranks):
            yield RemoteRank(rank, node, node.ranks[rank])


def _listed(nodes: Sequence[int]) -> str:
    """Nodes in words."""
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
