"""Nodes that come to node 0, those that do not fit, and those that do not come."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest

from quire.engine.execution.ranks.errors import NodesMissing, RankDied
from quire.engine.execution.ranks.messages import RankChannel
from quire.engine.execution.ranks.node import Node
from quire.engine.execution.ranks.node_messages import Choices, FromNode, Join, JoinRank, RankEnded
from quire.engine.execution.ranks.nodes import JoinedNode, NodeListener, remote_ranks
from quire.engine.execution.ranks.sockets import connection_of
from quire.engine.execution.ranks.workers import RankEntry, Workers
from quire.engine.models.distributed.rendezvous import Rendezvous, TcpRendezvous
from tests.support.process import free_port
from tests.support.ranks import ThreadRank

FACTS = {"--dtype": "float32", "the version of Quire": "1"}
CHOICES = Choices("auto", "auto", "none")
NODES = [range(1), range(1, 2), range(2, 3)]


@dataclass
class Gate:
    """Node 0, which waits."""

    listener: NodeListener
    port: int
    nodes: Future[list[JoinedNode]]
    stopped: threading.Event


class Stopped(Exception):
    """The server was told to end."""


@contextmanager
def waiting(ranks: list[range], seconds: float = 60.0) -> Iterator[Gate]:
    """Node 0 waits in a thread, for nodes with these ranks."""
    port, stopped = free_port(), threading.Event()

    def poll() -> None:
        if stopped.is_set():
            raise Stopped

    def wait() -> list[JoinedNode]:
        with listener:
            return listener.wait(FACTS, CHOICES, seconds, poll)

    listener = NodeListener("127.0.0.1", port, None, ranks)
    with ThreadPoolExecutor(1) as thread:
        gate = Gate(listener, port, thread.submit(wait), stopped)
        try:
            yield gate
        finally:
            stopped.set()
            if gate.nodes.exception() is None:
                for node in gate.nodes.result():
                    for connection in node.ranks.values():
                        connection.close()
                    node.end("")
            listener.store.close()


def node(gate: Gate, number: int, ranks: range) -> Node:
    return Node(number, ranks, "127.0.0.1", gate.port, f"127.0.0.{number + 1}")


def nothing(rank: int, rendezvous: Rendezvous, connection: Connection) -> None:
    connection.close()


def kept(connections: list[Connection]) -> Callable[..., ThreadRank]:
    """What starts a rank that does nothing, and keeps its connection."""

    def launch(entry: RankEntry, rank: int, rendezvous: Rendezvous, connection: Connection) -> ThreadRank:
        connections.append(connection)
        return ThreadRank(lambda *_: None, rank, rendezvous, connection)

    return launch


def stranger(gate: Gate, message: bytes) -> socket.socket:
    """A connection that sends something."""
    made = socket.create_connection(("127.0.0.1", gate.port))
    made.sendall(message)
    return made


def closed(made: socket.socket) -> bool:
    made.settimeout(60)
    with made:
        try:
            return made.recv(1) == b""
        except ConnectionResetError:
            return True


def test_node_0_waits_for_all_nodes_with_all_their_ranks() -> None:
    ranks: list[Connection] = []
    come: list[Node] = []
    with waiting([range(2), range(2, 4), range(4, 6)]) as gate:
        for number, own in ((2, range(4, 6)), (1, range(2, 4))):
            joining = node(gate, number, own)
            come.append(joining)
            welcome = joining.join(FACTS, 60)
            assert welcome.choices == CHOICES
            assert not gate.nodes.done()
            joining.start(nothing, welcome, kept(ranks))
        nodes = gate.nodes.result(60)
        assert [(each.node, each.address, sorted(each.ranks)) for each in nodes] == [
            (1, "127.0.0.2", [2, 3]),
            (2, "127.0.0.3", [4, 5]),
        ]
        assert gate.listener.rendezvous == TcpRendezvous("127.0.0.1", gate.listener.store.port, "127.0.0.1")
        with pytest.raises(ConnectionRefusedError):  # nobody else comes any more
            socket.create_connection(("127.0.0.1", gate.port))
    for joined in come:
        joined.close()
    for connection in ranks:
        connection.close()


def test_a_node_that_does_not_fit_ends_both_with_both_values() -> None:
    with waiting(NODES) as gate:
        error = (
            "--dtype is bfloat16 on node 1 and float32 on node 0; the version of Quire is 2 on node 1 and 1 on node 0"
        )
        with pytest.raises(NodesMissing, match=error):
            node(gate, 1, range(1, 2)).join({"--dtype": "bfloat16", "the version of Quire": "2"}, 60)
        with pytest.raises(NodesMissing, match=rf"node 1 \(127.0.0.2\) does not fit: {error}"):
            gate.nodes.result(60)


def test_nodes_that_do_not_come_are_named() -> None:
    with (
        waiting(NODES, 0.0) as gate,
        pytest.raises(NodesMissing, match=f"nodes 1, 2 of 3 did not come to .*{gate.port}"),
    ):
        gate.nodes.result(60)


def test_a_node_without_node_0_says_where_it_has_looked() -> None:
    port = free_port()
    with pytest.raises(NodesMissing, match=f"node 0 was not at 127.0.0.1:{port} .* within 0 s.*refused"):
        Node(1, range(1, 2), "127.0.0.1", port, None).join(FACTS, 0.0)


def test_a_second_node_of_a_number_is_refused_and_the_first_one_stays() -> None:
    with waiting(NODES) as gate:
        first = node(gate, 1, range(1, 2))
        first.join(FACTS, 60)
        with pytest.raises(NodesMissing, match=r"node 1 \(127.0.0.2\) has come already"):
            node(gate, 1, range(1, 2)).join(FACTS, 60)
        with pytest.raises(NodesMissing, match="there are the nodes 0 to 2"):
            node(gate, 5, range(5, 6)).join(FACTS, 60)
        assert not gate.nodes.done()
        first.close()


def test_a_node_that_ends_while_others_are_missing_may_come_again() -> None:
    ranks: list[Connection] = []
    with waiting(NODES[:2]) as gate:
        first = node(gate, 1, range(1, 2))
        first.join(FACTS, 60)
        first.close()
        while True:  # until node 0 has noticed that
            again = node(gate, 1, range(1, 2))
            try:
                welcome = again.join(FACTS, 60)
            except NodesMissing:
                continue
            break
        again.start(nothing, welcome, kept(ranks))
        assert [joined.node for joined in gate.nodes.result(60)] == [1]
        again.close()
    ranks[0].close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",  # the length of a message of a gigabyte
        b"\x00\x00\x00\x03abc\x00\x00\x00\x00",
        b"\x7f\xff\xff\xff",
        b"\x00\x00\x00\x00",
    ],
)
def test_strangers_are_sent_away(sent: bytes) -> None:
    with waiting(NODES) as gate:
        assert closed(stranger(gate, sent))
        assert not gate.nodes.done()


def test_a_connection_without_the_ticket_gets_no_rank() -> None:
    with waiting(NODES) as gate:
        joining = node(gate, 1, range(1, 2))
        welcome = joining.join(FACTS, 60)
        for rank, ticket in ((1, b"guessed"), (2, welcome.ticket)):
            made = socket.create_connection(("127.0.0.1", gate.port))
            copy = made.dup()
            channel = RankChannel(connection_of(made), FromNode)
            channel.send(JoinRank(rank, ticket))
            assert closed(copy)
            channel.close()
        assert not gate.nodes.done()
        joining.close()


def test_a_server_that_is_told_to_end_ends_the_nodes_that_have_come() -> None:
    with waiting(NODES) as gate:
        joining = node(gate, 1, range(1, 2))
        joining.join(FACTS, 60)
        gate.stopped.set()
        with pytest.raises(Stopped):
            gate.nodes.result(60)
        joining.run(lambda: False)
        joining.close()


def test_an_address_of_another_machine_is_explained() -> None:
    with pytest.raises(NodesMissing, match=r"cannot listen at --master-addr 192.0.2.1 --master-port 1234"):
        NodeListener("192.0.2.1", 1234, None, NODES)
    with pytest.raises(NodesMissing, match=r"cannot listen at --master-addr no.such.host.invalid"):
        NodeListener("no.such.host.invalid", 1234, None, NODES)
    with pytest.raises(NodesMissing, match=r"--master-addr :: .* it stands for all addresses"):
        NodeListener("::", 1234, None, NODES)


@contextmanager
def two_nodes() -> Iterator[tuple[Workers, Node, list[Connection]]]:
    """The workers of node 0, all of which are on node 1, and the connections of these."""
    ranks: list[Connection] = []
    with waiting([range(1), range(1, 3)]) as gate:
        joining = node(gate, 1, range(1, 3))
        joining.start(nothing, joining.join(FACTS, 60), kept(ranks))
        workers = Workers(nothing, 1, gate.listener.rendezvous, nodes=gate.nodes.result(60))
        yield workers, joining, ranks
        workers.close()
        joining.close()
        for connection in ranks:
            connection.close()


def test_a_rank_of_another_node_that_ends_is_named_with_its_exit_code() -> None:
    with two_nodes() as (workers, joining, ranks):
        workers.ensure_alive()
        noticed = threading.Event()
        workers.watch(noticed.set)
        assert joining._channel is not None
        joining._channel.send(RankEnded(2, -9))
        ranks[1].close()
        assert noticed.wait(60)
        with pytest.raises(RankDied, match=r"rank 2 of 3 on node 1 \(127.0.0.2\) .*process ended with exit code -9"):
            workers.ensure_alive()


def test_a_rank_whose_node_says_nothing_is_named() -> None:
    with two_nodes() as (workers, joining, ranks):
        joining.close()
        ranks[0].close()
        with pytest.raises(RankDied, match=r"rank 1 of 3 on node 1 \(127.0.0.2\) .*its connection has ended"):
            workers.ensure_alive()


@pytest.mark.parametrize(("error", "expected"), [("", None), ("rank 3 of 4 on node 2 has stopped", "rank 3 of 4")])
def test_a_node_ends_with_node_0_and_its_reason(error: str, expected: str | None) -> None:
    with two_nodes() as (workers, joining, _):
        workers.close(error)
        if expected is None:
            joining.run(lambda: False)
            return
        with pytest.raises(RankDied, match=f"node 0 at 127.0.0.1:.* has stopped: {expected}"):
            joining.run(lambda: False)


def test_a_node_notices_that_node_0_has_gone() -> None:
    with two_nodes() as (workers, joining, _):
        for remote in {remote.node.node: remote.node for remote in remote_ranks(workers._nodes)}.values():
            remote.channel.close()
        with pytest.raises(RankDied, match=r"node 0 at 127.0.0.1:.* has ended"):
            joining.run(lambda: False)


def test_a_node_that_is_told_to_end_does_so() -> None:
    with two_nodes() as (_, joining, _):
        joining.run(lambda: True)


def test_messages_from_other_nodes_are_bounded() -> None:
    with waiting(NODES) as gate:
        made = socket.create_connection(("127.0.0.1", gate.port))
        copy = made.dup()
        channel: Any = RankChannel(connection_of(made), FromNode)
        with suppress(ConnectionError):  # it is closed before all has been read
            channel.send(Join(1, {"--dtype": "x" * (1 << 20)}))
        assert closed(copy)
        channel.close()
