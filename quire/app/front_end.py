"""FrontEnd: one of several processes of a server that serve HTTP before one engine (--api-server-count).

Its parent tells it through a pipe of signals, of the engine's death and of other front ends that have ended. Front ends
ask each other through sockets in the private folder of the server.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import msgspec

from quire.api.http.key_usage import UsageRecord
from quire.api.http.keys import KeyRing
from quire.app.exits import end_process
from quire.app.models import ModelSource
from quire.app.running_models import NewObserver, RunningModel, StepTraces, front_end_of
from quire.config.commands import Serve
from quire.config.key_file import KeyFileError
from quire.config.options import ServerOptions
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.errors import EngineDead
from quire.engine.client.model_info import ModelInfo
from quire.engine.client.request_log import RequestLog
from quire.engine.client.shared_channel import FrontEndChannel, identity_of
from quire.engine.client.slots import Slots
from quire.multimodal.memory import MediaMemory
from quire.rendering.tokenizer import Tokenizer
from quire.serving.models import ServedModel, ServerState
from quire.workers.shared_counts import SharedCounts, TooManyRecords
from quire.workers.shares import Shares

logger = logging.getLogger("quire")
_SEQUENCES, _SESSIONS = TABLES = range(2)  # of the shared counts
_INTERRUPTED = 130  # exit status, as of a shell
_DIVIDED = ("max_total_body_size", "max_media_memory", "limit_concurrency")  # settings of which each process has a part


class Signalled(msgspec.Struct, frozen=True, tag="signal"):
    """The server has got a signal."""

    number: int


class CoreEnded(msgspec.Struct, frozen=True, tag="core_ended"):
    """The engine has ended. `restarts`: another one is started."""

    reason: str
    restarts: bool


class CoreStarted(msgspec.Struct, frozen=True, tag="core_started"):
    """Another engine loads the model, in place of one that has ended."""

    address: str


class OtherEnded(msgspec.Struct, frozen=True, tag="other_ended"):
    """Another front end has ended."""

    identity: str


class Listens(msgspec.Struct, frozen=True, tag="listens"):
    """The front end serves.

    `max_model_len`: the context that requests are checked for, if the KV cache may have reduced it.
    """

    max_model_len: int | None


ToFrontEnd = Signalled | CoreEnded | CoreStarted | OtherEnded
_NOTES: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)
OfCore = CoreEnded | CoreStarted | OtherEnded


@dataclass(slots=True)
class FrontEnd:
    """What a front end shares with the others, and what its parent tells it.

    Attributes:
        index: its number.
        generation: how many processes there have been with this number.
        count: number of front ends.
        counts: of slots, sessions, and the usage of keys.
        secret_key: signs client secrets.
        folder: of the sockets.
        address: of the core.
        connection: to the parent.
        on_signal: called with signals.
        on_core: called with what concerns the engine.
    """

    index: int
    generation: int
    count: int
    counts: SharedCounts
    secret_key: bytes
    folder: Path
    address: str
    connection: Connection
    on_signal: Callable[[int, FrameType | None], None] = field(default=lambda number, _: _end(number))
    on_core: Callable[[OfCore], None] | None = None
    _early: list[OfCore] = field(default_factory=list)

    @property
    def identity(self) -> str:
        """What tells it apart, also from those that had its number before."""
        return identity_of(self.index, self.generation)

    def listen(self) -> None:
        """Read what the parent says; on the event loop."""
        asyncio.get_running_loop().add_reader(self.connection.fileno(), self._read)

    def tell_that_it_listens(self, info: ModelInfo) -> None:
        """Tell the parent that requests are answered."""
        with suppress(OSError):  # the parent has ended, which ends this process
            self.connection.send_bytes(msgspec.msgpack.encode(Listens(info.max_model_len if info.num_blocks else None)))

    def watch_core(self, on_core: Callable[[OfCore], None]) -> None:
        """Call a function with what concerns the engine."""
        self.on_core = on_core
        early, self._early = self._early, []
        for note in early:
            on_core(note)

    def slots(self, settings: Serve) -> Slots:
        """The slots of the engine's sequences."""
        capacity = settings.max_num_seqs + settings.max_num_queued_seqs
        share = settings.max_client_share
        return Slots(capacity, share, self.counts.shares(_SEQUENCES, capacity, share))

    def session_places(self, settings: Serve) -> Shares:
        """The places of realtime sessions."""
        return self.counts.shares(_SESSIONS, settings.max_realtime_sessions, settings.max_client_share)

    def key_ring(self, options: ServerOptions) -> KeyRing:
        """The keys of the server, whose usage is counted for all front ends."""

        def record(name: str) -> UsageRecord:
            try:
                shared = self.counts.record(name)
            except TooManyRecords as error:
                raise KeyFileError(str(error)) from error
            numbers = shared.numbers
            return UsageRecord(numbers[:3], numbers[3:], shared.counts, self.index, self.counts.locked)

        return KeyRing(options, record)

    def divided(self, settings: Serve) -> Serve:
        """Return settings with this front end's part of what is divided."""
        parts = {name: max(1, getattr(settings, name) // self.count) for name in _DIVIDED}
        cache = settings.mm_processor_cache_gb / self.count
        return settings.model_copy(update={**parts, "mm_processor_cache_gb": cache, "file_store_size": 0})

    def _read(self) -> None:
        try:
            note = _NOTES.decode(self.connection.recv_bytes())
        except (EOFError, OSError):  # the parent has ended, which ends this process
            asyncio.get_running_loop().remove_reader(self.connection.fileno())
            return
        if isinstance(note, Signalled):
            self.on_signal(note.number, None)
        elif self.on_core is None:
            self._early.append(note)
        else:
            self.on_core(note)


def _end(number: int) -> None:
    """End a process that does not serve yet."""
    end_process(_INTERRUPTED if number == signal.SIGINT else 0)


class SharedModel(RunningModel):
    """A model whose engine several front ends share; another process runs it."""

    def __init__(self, source: ModelSource, settings: Serve, front_end: FrontEnd) -> None:
        """Connect to the engine, which is loading the model; `loaded` waits for it."""
        self._source = source
        self._settings = settings
        self._front_end = front_end
        self._tokenizer = Tokenizer.load(source.folder)
        self._rank = settings.first_replica if settings.has_part_of_replicas else 0
        slots, channel = front_end.slots(settings), FrontEndChannel(front_end.address, front_end.identity)
        self.client = EngineClient(channel, self._tokenizer.backend, slots, settings.first_replica)
        if settings.enable_log_requests:
            self.client.request_log = RequestLog(
                self._tokenizer.backend, settings.max_log_len, has_outputs=settings.enable_log_outputs
            )
        self._model: ServedModel | None = None
        self._gave_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._restarting: asyncio.Task[None] | None = None
        front_end.watch_core(self._handle)

    async def loaded(self, media_memory: MediaMemory | None = None) -> ServedModel:
        """See `RunningModel`."""
        info = await self.client.ready()
        self._model = front_end_of(
            self._source, self._settings, self._tokenizer, self.client, info, media_memory=media_memory
        )
        return self._model

    def observe(self, new_observer: NewObserver, number: int) -> None:
        """See `RunningModel`."""
        self.client.observers.add(new_observer(self._rank))

    async def watch(self, state: ServerState, give_up: Callable[[str], None]) -> None:
        """Wait until the parent does not start the engine again; then call `give_up` with the reason."""
        reason = await asyncio.shield(self._gave_up)
        if not state.draining:
            give_up(reason)

    async def stop(self) -> None:
        """See `RunningModel`. The engine goes on."""
        if self._restarting is not None:
            self._restarting.cancel()
        if self._model is not None:
            await self._model.close()
        await self.client.close()

    def _handle(self, note: OfCore) -> None:
        match note:
            case OtherEnded(identity=identity):
                self.client.forget_front_end(identity)
            case CoreEnded(reason=reason, restarts=restarts):
                self.client.fail(reason)
                if restarts:
                    self.client.announce_restart(reason)
                elif not self._gave_up.done():
                    self._gave_up.set_result(str(self.client.dead or reason))
            case CoreStarted(address=address):
                self._restarting = asyncio.create_task(self._reconnect(address))

    async def _reconnect(self, address: str) -> None:
        """Connect to another engine. If it cannot be loaded, the parent starts yet another one, or gives up."""
        await self.client.reconnect(FrontEndChannel(address, self._front_end.identity))
        with suppress(EngineDead):
            await self.client.ready()


async def start_shared_model(
    settings: Serve, sources: Sequence[ModelSource], front_end: FrontEnd, _: StepTraces | None = None
) -> AsyncIterator[RunningModel]:
    """Give the model of a front end."""
    (source,) = sources
    yield SharedModel(source, settings, front_end)
