"""FrontEnd: one of several processes of a server that serve HTTP before one engine (--api-server-count).

Its parent tells it through a pipe of signals, of the engine's death and of other front ends that have ended. Front ends
ask each other through sockets in the private folder of the server.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import msgspec

from quire.api.http.key_usage import UsageRecord
from quire.api.http.keys import KeyRing
from quire.app.exits import end_process
from quire.app.front_end_notes import CoreSeat, FromFrontEnd, Listens, OfCores, Signalled, ToFrontEnd
from quire.config.commands import Serve
from quire.config.key_file import KeyFileError
from quire.config.options import ServerOptions
from quire.engine.client.model_info import ModelInfo
from quire.engine.client.replicas.shared_dispatch import SharedDispatch
from quire.engine.client.shared_channel import identity_of
from quire.engine.client.slots import Slots
from quire.workers.shared_counts import SharedCounts, TooManyRecords
from quire.workers.shares import Shares

_SEQUENCES, _SESSIONS = TABLES = range(2)  # of the shared counts
_NOTES: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)
_INTERRUPTED = 130  # exit status, as of a shell
_DIVIDED = ("max_total_body_size", "max_media_memory", "limit_concurrency")  # settings of which each process has a part


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
        cores: of the engine.
        dispatch: what front ends know together of replicas; None: the engine has one core.
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
    cores: Sequence[CoreSeat]
    dispatch: SharedDispatch | None
    connection: Connection
    on_signal: Callable[[int, FrameType | None], None] = field(default=lambda number, _: _end(number))
    on_core: Callable[[OfCores], None] | None = None
    _early: list[OfCores] = field(default_factory=list)

    @property
    def identity(self) -> str:
        """What tells it apart, also from those that had its number before."""
        return identity_of(self.index, self.generation)

    def listen(self) -> None:
        """Read what the parent says; on the event loop."""
        asyncio.get_running_loop().add_reader(self.connection.fileno(), self._read)

    def tell_that_it_listens(self, info: ModelInfo) -> None:
        """Tell the parent that requests are answered."""
        self.tell(Listens(info.max_model_len if info.num_blocks else None, info.cache_bytes))

    def tell(self, note: FromFrontEnd) -> None:
        """Tell the parent something."""
        with suppress(OSError):  # it has ended, which ends this process
            self.connection.send_bytes(msgspec.msgpack.encode(note))

    def watch_core(self, on_core: Callable[[OfCores], None]) -> None:
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
