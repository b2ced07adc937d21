"""Connections between engines: whatever a peer sends, it harms neither the engine nor other peers."""

from __future__ import annotations

import gc
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from quire.engine.client.kv_transfer import RemoteBlocks
from quire.engine.transfer import wire
from quire.engine.transfer.block_reader import BlockReader, ReadBlock
from quire.engine.transfer.block_server import AddressUnavailable, BlockServer
from quire.engine.transfer.loop_thread import LoopThread
from tests.support.patience import PATIENCE
from tests.support.process import eventually

BLOCK = 64
FACTS = {"block size": "16", "data type": "float32"}
HELLO = wire.Hello(FACTS)


def content_of(key: bytes) -> bytes:
    return (key * BLOCK)[:BLOCK]


class Ends:
    """A server and a reader of blocks, in place of two engines."""

    def __init__(self, *, max_connections: int = 8, timeout: float = PATIENCE) -> None:
        self.thread = LoopThread()
        self.woken = threading.Event()
        self.server = BlockServer(self.thread, ("127.0.0.1", 0), BLOCK, max_connections, self.woken.set)
        self.reader = BlockReader(self.thread, BLOCK, timeout)
        self.server.set_facts(FACTS)
        self.reader.set_facts(FACTS)
        self.released: list[str] = []

    def remote(self, port: int | None = None) -> RemoteBlocks:
        port = self.server.port if port is None else port
        return RemoteBlocks(engine_id="x", host="127.0.0.1", port=port, request_id="r", num_tokens=1)

    def serve(self) -> None:
        """Give what was asked for, as an engine does between its steps; it has all keys but b"missing"."""
        self.released += self.server.take_released()
        for read in self.server.readable():
            key = read.keys[read.next]
            self.server.put(read, None if key == b"missing" else content_of(key))

    def take(self) -> ReadBlock:
        while (block := self.reader.take()) is None:
            self.serve()
            self.reader.wait(0.001)
        return block

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE) as peer:
            yield peer


@contextmanager
def ends(**options: float) -> Iterator[Ends]:
    opened = Ends(**options)  # type: ignore[arg-type]
    try:
        yield opened
    finally:
        opened.server.close()
        opened.thread.close()


def frame(message: wire.Message, content: bytes = b"") -> bytes:
    encoded = msgspec.msgpack.encode(message)
    return struct.pack("<II", len(encoded), len(content)) + encoded + content


def received(peer: socket.socket) -> wire.Message | None:
    header = exactly(peer, 8)
    if len(header) < 8:
        return None
    length, following = struct.unpack("<II", header)
    message: wire.Message = msgspec.msgpack.decode(exactly(peer, length), type=wire.Message)
    exactly(peer, following)
    return message


def exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            piece = peer.recv(count - len(data))
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece
    return data


def assert_serves(opened: Ends) -> None:
    keys = [b"%d" % number for number in range(300)]
    opened.reader.load(99, opened.remote(), keys)
    for index, key in enumerate(keys):
        assert opened.take() == ReadBlock(99, index, content_of(key))
    opened.released.clear()

    def is_released() -> bool:
        opened.serve()
        return opened.released == ["r"]

    eventually(is_released)


def test_a_load_that_is_cancelled_before_it_has_a_connection_is_released() -> None:
    """The prefiller would keep its blocks until they expire."""
    with ends() as opened:
        opened.reader._thread.call(opened.reader._has_facts.clear)  # for which connections wait
        for serial in range(3):
            opened.reader.load(serial, opened.remote(), [b"1"])
            opened.reader.cancel(serial)
        opened.reader.set_facts(FACTS)

        def are_released() -> bool:
            opened.serve()
            return opened.released == ["r"] * 3

        eventually(are_released)
        assert opened.reader.take() is None
        assert_serves(opened)


def test_blocks_come_in_the_order_in_which_they_were_asked_for() -> None:
    with ends() as opened:
        assert_serves(opened)


def test_a_block_that_is_missing_ends_a_read() -> None:
    with ends() as opened:
        opened.reader.load(1, opened.remote(), [b"a", b"missing", b"b"])
        assert opened.take().content == content_of(b"a")
        last = opened.take()
        assert (last.content, last.error) == (None, "it does not keep them any more, or never had them")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<II", 1 << 31, 0),
        struct.pack("<II", 0, 1 << 31),
        struct.pack("<II", 4, 0) + b"\xc1\xc1\xc1\xc1",
        frame(wire.Ask("r", [b"a"])),
        frame(wire.Release("r")),
        frame(wire.Hello({"x" * 100: "y"})),
        frame(HELLO) + frame(HELLO),
        frame(HELLO) + frame(wire.Block(0, b""), bytes(BLOCK)),
        frame(HELLO) + struct.pack("<II", 9 << 20, 0),
        frame(HELLO) + frame(wire.Ask("r", [b""] * ((1 << 17) + 1))),
        frame(HELLO) + frame(wire.Ask("r", [b"a"] * 100)) + frame(wire.Ask("r", [b"a"])),
        frame(HELLO) + frame(wire.Ask("r", [b"a"] * 100))[:-3],
    ],
)
def test_peers_that_send_something_else_are_left(sent: bytes) -> None:
    with ends() as opened:
        with opened.connection() as peer:
            assert received(peer) == wire.Greeting(wire.PROTOCOL)
            peer.sendall(sent)
            peer.shutdown(socket.SHUT_WR)
            answers = []
            while (answer := received(peer)) is not None:
                answers.append(answer)
            assert all(isinstance(answer, wire.Welcome | wire.Refused) for answer in answers)
        assert_serves(opened)


def test_connections_have_a_bound() -> None:
    with ends(max_connections=1) as opened:
        with opened.connection() as first:
            assert received(first) == wire.Greeting(wire.PROTOCOL)
            with opened.connection() as second:
                assert received(second) is None
            opened.reader.load(1, opened.remote(), [b"a"])
            assert opened.take().error != ""

        def is_free() -> bool:
            with opened.connection() as third:
                return received(third) == wire.Greeting(wire.PROTOCOL)

        eventually(is_free)
        assert opened.released == []


def test_differences_are_named_with_both_values() -> None:
    with ends() as opened:
        opened.server.set_facts({**FACTS, "data type": "int8"})
        opened.reader.load(1, opened.remote(), [b"a"])
        assert opened.take().error == ("it refuses: the data type is float32 at the decoder and int8 at the prefiller")
        opened.server.set_facts("the weights were replaced")
        opened.reader.load(2, opened.remote(), [b"a"])
        assert opened.take().error == "it refuses: the weights were replaced"


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-x\r\n", frame(wire.Greeting("quire-kv-0")), frame(wire.Welcome())])
def test_a_decoder_sends_nothing_to_a_server_of_another_kind(greeting: bytes) -> None:
    with ends(timeout=5.0) as opened, socket.create_server(("127.0.0.1", 0)) as other:
        opened.reader.load(1, opened.remote(other.getsockname()[1]), [b"a"])
        peer, _ = other.accept()
        with peer:
            peer.settimeout(PATIENCE)
            peer.sendall(greeting)
            peer.shutdown(socket.SHUT_WR)
            assert exactly(peer, 1) == b""
        assert opened.take().content is None


def test_what_was_read_and_not_taken_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.transfer.block_reader._QUEUE", 3 * BLOCK)
    with ends() as opened:
        opened.reader.load(1, opened.remote(), [b"%d" % number for number in range(50)])
        blocks = list[ReadBlock]()
        while len(blocks) < 50:
            blocks.append(opened.take())
            assert len(opened.reader._read) <= 3
        assert [block.index for block in blocks] == list(range(50))


def test_a_read_that_is_cancelled_releases_what_is_kept() -> None:
    with ends() as opened:
        opened.reader.load(1, opened.remote(), [b"a", b"b"])
        eventually(opened.server.readable)  # it has asked
        opened.reader.cancel(1)

        def is_released() -> bool:
            opened.released += opened.server.take_released()
            return opened.released == ["r"]

        eventually(is_released)
        eventually(lambda: not opened.server.readable())


def test_an_address_that_is_taken() -> None:
    with ends() as opened, pytest.raises(AddressUnavailable, match=f"127.0.0.1:{opened.server.port}"):
        BlockServer(opened.thread, ("127.0.0.1", opened.server.port), BLOCK, 1, lambda: None)


def test_a_connection_that_is_accepted_while_the_server_ends_is_closed() -> None:
    """A warning of an open socket would be an error of this test."""
    connected, accepts, ends_now = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:  # while the connection waits to be accepted behind it, and the end of the server behind both
        accepts.set()
        ends_now.wait(PATIENCE)

    with ends() as opened:
        opened.thread.call(connected.wait, PATIENCE)
        with opened.connection():
            opened.thread.call(hold)
            connected.set()
            assert accepts.wait(PATIENCE)
            opened.server.close()
            ends_now.set()
    gc.collect()
