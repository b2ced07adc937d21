"""BlockServer: sends blocks of an engine to those that ask for them by key."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from quire.engine.client.facts import Facts, differences
from quire.engine.transfer import wire
from quire.engine.transfer.loop_thread import LoopThread
from quire.engine.transfer.security import NO_SECURITY, Security

logger = logging.getLogger(__name__)
_HANDSHAKE = 10.0  # seconds
_STALL = 120.0  # seconds in which a decoder takes or asks for nothing
_QUEUE = 4 << 20  # bytes of blocks that wait for a connection, at least two blocks
_UNPROVED = "the decoder does not prove that it has the secret of the prefiller (secret_file)"
_RELEASED = 1 << 14  # releases that wait for the engine; more are dropped, and the blocks expire


class AddressUnavailable(Exception):
    """The server cannot listen at its address."""


@dataclass(slots=True, eq=False)
class BlockRead:
    """Blocks that a decoder has asked for.

    Attributes:
        next: index of the key that the engine looks up next.
        found: what it has looked up and is not sent yet, with its index; None: the block is not there.
        ready: something was found.
        is_over: no more is wanted, or there.
    """

    request_id: str
    keys: Sequence[bytes]
    next: int = 0
    found: deque[tuple[int, bytes | None]] = field(default_factory=deque)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False


class BlockServer:
    """Listen for decoders. The engine answers what they ask between its steps, and never waits for one."""

    def __init__(
        self,
        thread: LoopThread,
        address: tuple[str, int],
        block_bytes: int,
        max_connections: int,
        wake: Callable[[], None],
        security: Security = NO_SECURITY,
    ) -> None:
        """Bind the socket.

        Args:
            thread: has the connections.
            address: host and port; port 0: a free one.
            block_bytes: bytes of a block.
            max_connections: further ones are closed.
            wake: wakes the engine up, as something was asked. Called in the thread.
            security: what a decoder has to prove, and the certificate.

        Raises:
            AddressUnavailable: the address cannot be bound.
        """
        self._thread = thread
        self._most = max(2, _QUEUE // block_bytes)
        self._max_connections = max_connections
        self._wake = wake
        self._security = security
        self._facts: asyncio.Future[Facts | str] | None = None
        self._connections = 0
        self._reads: dict[BlockRead, None] = {}
        self._released: deque[str] = deque()
        self._socket = _bound(*address)
        self.port: int = self._socket.getsockname()[1]
        self._server = thread.run(self._start())

    def set_facts(self, facts: Facts | str) -> None:
        """Set what the blocks are, which decoders wait for; or why none are sent."""
        self._thread.call(self._set_facts, facts)

    def readable(self) -> list[BlockRead]:
        """Return what the engine can look up now."""
        return [
            read
            for read in [*self._reads]
            if not read.is_over and len(read.found) < self._most and read.next < len(read.keys)
        ]

    def put(self, read: BlockRead, content: bytes | None) -> None:
        """Send the next block of a read; None: it is not there."""
        read.found.append((read.next, content))
        read.next += 1
        read.is_over = content is None or read.is_over
        self._thread.call(read.ready.set)

    def take_released(self) -> list[str]:
        """Return the requests whose blocks need not be kept any more."""
        released = []
        while self._released:
            released.append(self._released.popleft())
        return released

    def close(self) -> None:
        """Listen no longer. The thread ends the connections."""
        with suppress(RuntimeError):  # the loop has ended
            self._thread.call(self._stop_listening)

    def _stop_listening(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        # Connections that asyncio is accepting need an open server: without it they would fail, and stay open.
        loop.call_soon(self._server.close)

    def _set_facts(self, facts: Facts | str) -> None:
        assert self._facts is not None
        if self._facts.done():
            self._facts = asyncio.get_running_loop().create_future()
        self._facts.set_result(facts)

    async def _start(self) -> asyncio.Server:
        self._facts = asyncio.get_running_loop().create_future()
        return await asyncio.start_server(self._accept, sock=self._socket, limit=1 << 20)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._thread.spawn(self._connected(reader, writer))
        task.add_done_callback(lambda _: writer.transport.abort())  # also if it was cancelled before it began

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= self._max_connections:
            return
        self._connections += 1
        try:
            await self._serve(reader, writer)
        except (wire.TransferError, OSError, TimeoutError) as error:
            logger.debug("a decoder's connection has ended: %s", error)
        finally:
            self._connections -= 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        security, challenge = self._security, self._security.challenge()
        async with asyncio.timeout(_HANDSHAKE):
            wire.write(writer, wire.Greeting(wire.PROTOCOL, challenge, security.accepting is not None))
            if security.accepting is not None:
                await writer.start_tls(security.accepting)
            received = await wire.read(reader, "handshake")
        if received is None or not isinstance(hello := received[0], wire.Hello):
            return
        if not security.accepts(hello.proof, "decoder", challenge, hello.challenge):
            await self._refuse(writer, _UNPROVED)
            return
        assert self._facts is not None
        async with asyncio.timeout(_STALL):
            facts = await asyncio.shield(self._facts)
        refusal = facts if isinstance(facts, str) else _refusal_of(hello.facts, facts)
        if refusal is not None:
            await self._refuse(writer, refusal)
            return
        wire.write(writer, wire.Welcome(security.proof("prefiller", challenge, hello.challenge)))
        async with asyncio.timeout(_STALL):
            received = await wire.read(reader)
        match received:
            case (wire.Ask() as ask, _):
                await self._send(BlockRead(ask.request_id, ask.keys), reader, writer)
            case (wire.Release(request_id=request_id), _):
                self._release(request_id)
            case _:
                return

    async def _refuse(self, writer: asyncio.StreamWriter, reason: str) -> None:
        logger.warning("a decoder was refused: %s", reason)
        wire.write(writer, wire.Refused(reason))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def _send(self, read: BlockRead, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the blocks of a read as the engine finds them, unless the decoder releases them or ends before."""
        sending = self._thread.spawn(self._send_found(read, writer))
        listening = asyncio.ensure_future(wire.read(reader))
        try:
            await asyncio.wait((sending, listening), return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not listening.done():
                await sending
                async with asyncio.timeout(_STALL):
                    await listening
            received = listening.result()
            if received is None or not isinstance(received[0], wire.Release):
                raise wire.TransferError("the decoder has ended the connection")
            self._release(received[0].request_id)
        finally:
            read.is_over = True
            sending.cancel()
            listening.cancel()
            await asyncio.gather(sending, listening, return_exceptions=True)

    async def _send_found(self, read: BlockRead, writer: asyncio.StreamWriter) -> None:
        self._reads[read] = None
        try:
            sent = 0
            while sent < len(read.keys):
                self._wake()
                async with asyncio.timeout(_STALL):
                    await read.ready.wait()
                    read.ready.clear()
                    while read.found:
                        index, content = read.found.popleft()
                        if content is None:
                            wire.write(writer, wire.Missing(index))
                            await writer.drain()
                            return
                        wire.write(writer, wire.Block(index, wire.checksum(read.keys[index], content)), content)
                        await writer.drain()
                        sent += 1
        finally:
            del self._reads[read]

    def _release(self, request_id: str) -> None:
        if len(self._released) < _RELEASED:
            self._released.append(request_id)
        self._wake()


def _refusal_of(decoder: Facts, prefiller: Facts) -> str | None:
    """Return the first difference between two engines; None: there is none."""
    for name, theirs, ours in differences(decoder, prefiller):
        return f"the {name} is {theirs} at the decoder and {ours} at the prefiller"
    return None


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise AddressUnavailable(
            f"--kv-transfer-config: {host}:{port} (kv_ip, kv_port) is not available: {error.strerror}"
        ) from error
    return bound
