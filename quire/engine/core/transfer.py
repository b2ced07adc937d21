"""Transfer: copies blocks between the KV cache and the connections to other engines, between the steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from quire.engine.client.kv_transfer import BlockTransfer, RemoteBlocks
from quire.engine.client.protocol import RequestFields, StepStats
from quire.engine.execution.cache import KVCache
from quire.engine.scheduling.block_loads import EndedLoad
from quire.engine.scheduling.block_source import BlockSource, RemoteSources
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.transfer.block_reader import BlockReader
from quire.engine.transfer.block_server import BlockServer
from quire.engine.transfer.loop_thread import LoopThread

_SHARE_OF_STEP = 0.05  # of the time of the last step, in which blocks are copied before the next
_LEAST = 0.002  # seconds
_REPLACED = "the weights were replaced, and other servers may have others until a restart"


@dataclass(frozen=True, slots=True)
class _RemoteSource(BlockSource):
    reader: BlockReader
    remote: RemoteBlocks

    @override
    def has(self, key: bytes) -> bool:
        return True

    @override
    def load(self, serial: int, keys: Sequence[bytes]) -> None:
        self.reader.load(serial, self.remote, keys)

    @override
    def cancel(self, serial: int) -> None:
        self.reader.cancel(serial)


class ReaderSources(RemoteSources):
    """The engines that a reader reads blocks of."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader

    @override
    def source(self, remote: RemoteBlocks) -> BlockSource:
        return _RemoteSource(self._reader, remote)

    @override
    def release(self, remote: RemoteBlocks) -> None:
        self._reader.release(remote)


class Transfer:
    """Give other engines the blocks that they ask for, and fill blocks with what comes from them.

    Between two steps this takes a small part of a step's time. Nothing waits for a connection.
    """

    def __init__(
        self, thread: LoopThread, block_bytes: int, server: BlockServer | None, reader: BlockReader | None
    ) -> None:
        """Assemble a transfer.

        Args:
            thread: has the connections; `close` ends it.
            block_bytes: bytes of a block.
            server: sends blocks; None: none are sent.
            reader: reads blocks; None: none are read.
        """
        self._thread = thread
        self._block_bytes = block_bytes
        self._server = server
        self._reader = reader
        self._seconds = _LEAST
        self._ended: list[EndedLoad] = []

    def refusal(self, request: RequestFields) -> str | None:
        """Return why the engine does not do what a request asks for; None: it does."""
        if request.is_held and self._server is None:
            return "the engine sends no KV blocks to others"
        if request.remote is not None and self._reader is None:
            return "the engine reads no KV blocks of others"
        return None

    @property
    def has_reads(self) -> bool:
        """Whether other engines wait for blocks that can be looked up now."""
        return self._server is not None and bool(self._server.readable())

    def step_took(self, seconds: float) -> None:
        """Note how long a step has taken."""
        self._seconds = max(_LEAST, seconds * _SHARE_OF_STEP)

    def serve(self, scheduler: Scheduler, cache: KVCache | None) -> bool:
        """Send some of the blocks that others have asked for, and give back what they have read or nobody wants.

        `cache`: None: it has no memory now.

        Returns:
            Whether blocks were given back.
        """
        if self._server is None or scheduler.held is None:
            return False
        held, before = scheduler.held, len(scheduler.held)
        for request_id in self._server.take_released():
            held.end(request_id)
        held.expire()
        deadline = time.monotonic() + self._seconds
        while (reads := self._server.readable()) and time.monotonic() < deadline:
            for read in reads:
                block = None if cache is None else held.find(read.request_id, read.keys[read.next])
                self._server.put(read, None if block is None or cache is None else cache.read(block))
        return len(held) < before

    def receive(self, scheduler: Scheduler, cache: KVCache) -> None:
        """Fill blocks with some of what has come."""
        loads = scheduler.loads
        if self._reader is None or loads is None:
            return
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline and (read := self._reader.take()) is not None:
            block = loads.block(read.serial, read.index)
            if block is None:
                continue
            if read.content is None:
                loads.failed(read.serial, read.error)
            else:
                cache.write(block, read.content)
                loads.received(read.serial, read.index)

    def wait(self, seconds: float) -> None:
        """Wait for a block to come, at most so long."""
        if self._reader is not None:
            self._reader.wait(seconds)

    def note_ended(self, ended: Sequence[EndedLoad]) -> None:
        """Note loads that have ended, for the statistics."""
        self._ended += [load for load in ended if load.is_remote]

    def count(self, scheduler: Scheduler, stats: StepStats) -> None:
        """Add what has come, and what was given back unread, since the last call to the statistics of a step."""
        stats.expired_holds = 0 if scheduler.held is None else scheduler.held.take_expired()
        ended, self._ended = self._ended, []
        stats.failed_transfers = sum(load.failure is not None for load in ended)
        stats.transfers = [
            BlockTransfer(load.seconds, load.blocks * self._block_bytes) for load in ended if load.failure is None
        ]

    def stop(self) -> None:
        """Neither send nor read blocks any more, as they are of other weights."""
        for end in (self._server, self._reader):
            if end is not None:
                end.set_facts(_REPLACED)

    def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        self._thread.close()
