"""BlockReader: reads blocks of other engines, each request's over a connection of its own."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from quire.engine.client.facts import Facts
from quire.engine.client.kv_transfer import RemoteBlocks
from quire.engine.transfer import wire
from quire.engine.transfer.loop_thread import LoopThread
from quire.engine.transfer.security import NO_SECURITY, Security

logger = logging.getLogger(__name__)
_CONNECT = 5.0  # seconds
_RELEASE = 5.0  # seconds in which a peer is told what it need not keep
_QUEUE = 64 << 20  # bytes that were read and not taken, at least two blocks
_RELEASES = 256  # requests at a time of which only this is told; the blocks of others expire


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """A block that was read for a load.

    Attributes:
        serial: of the load.
        index: of the block in it.
        content: its bytes; None: no further one follows.
        error: why.
    """

    serial: int
    index: int
    content: bytes | None
    error: str = ""


class BlockReader:
    """Read blocks in the thread of connections. What was read and not taken has a bound in bytes."""

    def __init__(self, thread: LoopThread, block_bytes: int, timeout: float, security: Security = NO_SECURITY) -> None:
        """Make a reader.

        Args:
            thread: has the connections.
            block_bytes: bytes of a block.
            timeout: seconds that the blocks of a request may take.
            security: what a prefiller has to prove, and who vouches for its certificate.
        """
        self._security = security
        self._thread = thread
        self._block_bytes = block_bytes
        self._timeout = timeout
        self._most = max(2, _QUEUE // block_bytes)
        self._read: deque[ReadBlock] = deque()
        self._changed = threading.Condition()
        self._room = asyncio.Event()
        self._facts: Facts | str | None = None
        self._has_facts = asyncio.Event()
        self._loads: dict[int, tuple[asyncio.Task[None], RemoteBlocks]] = {}
        self._connected: set[int] = set()  # loads whose peers are told at their end what they need not keep
        self._releasing = 0

    def set_facts(self, facts: Facts | str) -> None:
        """Set what the blocks of this engine are, which reads wait for; or why none are read."""
        self._facts = facts
        self._thread.call(self._has_facts.set)

    def load(self, serial: int, remote: RemoteBlocks, keys: Sequence[bytes]) -> None:
        """Begin to read blocks, which `take` returns in this order."""
        self._thread.call(self._begin, serial, remote, list(keys))

    def cancel(self, serial: int) -> None:
        """Read no more blocks of a load; some may be returned yet."""
        self._thread.call(self._cancel, serial)

    def release(self, remote: RemoteBlocks) -> None:
        """Tell a peer that it need not keep blocks, none of which were read."""
        self._thread.call(self._begin_release, remote)

    def take(self) -> ReadBlock | None:
        """Return the next block that was read; None: there is none now."""
        if not self._read:
            return None
        with self._changed:
            block = self._read.popleft()
        self._thread.call(self._room.set)
        return block

    def wait(self, seconds: float) -> None:
        """Wait until a block was read, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._read, timeout=seconds)

    def _put(self, block: ReadBlock) -> None:
        with self._changed:
            self._read.append(block)
            self._changed.notify_all()

    def _begin(self, serial: int, remote: RemoteBlocks, keys: list[bytes]) -> None:
        self._loads[serial] = self._thread.spawn(self._load(serial, remote, keys)), remote

    def _cancel(self, serial: int) -> None:
        if (load := self._loads.pop(serial, None)) is not None:
            task, remote = load
            task.cancel()
            if serial not in self._connected:
                self._begin_release(remote)

    def _begin_release(self, remote: RemoteBlocks) -> None:
        if self._releasing < _RELEASES:
            self._releasing += 1
            self._thread.spawn(self._release(remote))

    async def _release(self, remote: RemoteBlocks) -> None:
        try:
            async with asyncio.timeout(_RELEASE):
                await self._read_blocks(-1, remote, [])
        except (wire.TransferError, OSError, TimeoutError) as error:
            logger.debug("%s:%d could not be told what to keep no longer: %s", remote.host, remote.port, error)
        finally:
            self._releasing -= 1

    async def _load(self, serial: int, remote: RemoteBlocks, keys: list[bytes]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._read_blocks(serial, remote, keys)
        except (wire.TransferError, OSError, TimeoutError) as error:
            reason = f"they took longer than {self._timeout:g} s (load_timeout)" if _is_timeout(error) else str(error)
            logger.warning("KV blocks could not be read from %s:%d: %s", remote.host, remote.port, reason)
            self._put(ReadBlock(serial, 0, None, reason))
        finally:
            self._loads.pop(serial, None)
            self._connected.discard(serial)

    async def _read_blocks(self, serial: int, remote: RemoteBlocks, keys: list[bytes]) -> None:
        """Read blocks, and release all that are kept for the request, also after an error.

        Raises:
            TransferError: the peer refuses, or has not all of them.
            OSError: it cannot be reached, or has died.
            TimeoutError: it does not answer.
        """
        await self._has_facts.wait()
        facts = self._facts
        if isinstance(facts, str):
            raise wire.TransferError(facts)
        assert facts is not None
        try:
            async with asyncio.timeout(_CONNECT):
                reader, writer = await asyncio.open_connection(remote.host, remote.port, limit=1 << 20)
        except TimeoutError as error:
            raise wire.TransferError(f"it does not accept a connection within {_CONNECT:g} s") from error
        is_released = False
        try:
            await _shake_hands(reader, writer, facts, self._security, remote.host)
            try:
                if keys:
                    self._connected.add(serial)
                    wire.write(writer, wire.Ask(remote.request_id, keys))
                    await self._receive(serial, keys, reader)
            finally:
                wire.write(writer, wire.Release(remote.request_id))
                is_released = not self._thread.is_closing
                if is_released:  # a task that is cancelled before it begins would close nothing itself
                    self._thread.spawn(_until_closed(reader)).add_done_callback(lambda _: writer.close())
        except (wire.TransferError, OSError, TimeoutError, asyncio.CancelledError):
            if not is_released:
                writer.close()
            raise

    async def _receive(self, serial: int, keys: list[bytes], reader: asyncio.StreamReader) -> None:
        for index, key in enumerate(keys):
            received = await wire.read(reader, content_size=self._block_bytes)
            match received:
                case (wire.Block(index=number, checksum=expected), content) if number == index and content:
                    if wire.checksum(key, content) != expected:
                        raise wire.TransferError("the checksum of a block is another one")
                case (wire.Missing(), _):
                    raise wire.TransferError("it does not keep them any more, or never had them")
                case None:
                    raise wire.TransferError("it has closed the connection")
                case _:
                    raise wire.TransferError("it has sent something else than the block that follows")
            while len(self._read) >= self._most:
                self._room.clear()
                if len(self._read) >= self._most:
                    await self._room.wait()
            self._put(ReadBlock(serial, index, content))


async def _shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, facts: Facts, security: Security, host: str
) -> None:
    """Find out whether a peer is one that blocks are read from, and has blocks of the same kind.

    `host`: whose certificate it has.

    Raises:
        TransferError: it is not, or has not.
    """
    received = await wire.read(reader, "handshake")
    if received is None:
        raise wire.TransferError("it has closed the connection, as it has too many (max_connections)")
    greeting = received[0]
    if not isinstance(greeting, wire.Greeting) or greeting.protocol != wire.PROTOCOL:
        raise wire.TransferError(f"it speaks another protocol than {wire.PROTOCOL}")
    if bool(greeting.challenge) != bool(security.secret):
        raise wire.TransferError(f"{_one_end(is_prefiller=bool(greeting.challenge))} has a secret (secret_file)")
    await _start_tls(writer, greeting, security, host)
    challenge = security.challenge()
    proof = security.proof("decoder", greeting.challenge, challenge)
    wire.write(writer, wire.Hello(dict(facts), challenge, proof))
    match await wire.read(reader, "handshake"):
        case (wire.Welcome(proof=proof), _):
            if not security.accepts(proof, "prefiller", greeting.challenge, challenge):
                raise wire.TransferError("it does not prove that it has the secret of this server (secret_file)")
        case (wire.Refused(reason=reason), _):
            raise wire.TransferError(f"it refuses: {reason}")
        case _:
            raise wire.TransferError("it has ended the handshake")


async def _start_tls(writer: asyncio.StreamWriter, greeting: wire.Greeting, security: Security, host: str) -> None:
    """Encrypt a connection, if both ends are to.

    Raises:
        TransferError: one is not, or the certificate is not one of `host`.
    """
    if greeting.tls != (security.connecting is not None):
        raise wire.TransferError(f"{_one_end(is_prefiller=greeting.tls)} has TLS (tls_certfile, tls_ca_file)")
    if security.connecting is not None:
        try:
            await writer.start_tls(security.connecting, server_hostname=host)
        except ssl.SSLError as error:
            raise wire.TransferError(f"TLS: {error}") from error


def _one_end(*, is_prefiller: bool) -> str:
    return "only the prefiller" if is_prefiller else "only this server"


async def _until_closed(reader: asyncio.StreamReader) -> None:
    """Wait until the peer has closed a connection: what is unread would make the system drop what it has not read."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_RELEASE):
            while await reader.read(1 << 16):
                pass


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, TimeoutError) and not str(error)
