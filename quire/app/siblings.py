"""Siblings: what the front ends of a server ask each other, through sockets in the server's private folder."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import Metric
from typing_extensions import override

from quire.app.front_end import FrontEnd
from quire.app.running_models import RunningModel
from quire.app.shared_model import ModelBeforeSharedCores
from quire.app.stats_log import StatsCounts, StatsLog
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.siblings import Notice
from quire.engine.client.siblings import Siblings as EngineSiblings
from quire.metrics.merging import ProcessDump, merged
from quire.metrics.prometheus import Metrics
from quire.serving.models import ServerState
from quire.serving.siblings import OtherProcesses

logger = logging.getLogger(__name__)
_PATIENCE = 2.0  # seconds for an answer; without one, what was known before counts
_HEEDING = 30.0  # seconds for what has to be done before the answer


class TellNotice(msgspec.Struct, frozen=True, tag="notice"):
    """Do what a notice about the core with a rank means."""

    rank: int
    notice: Notice


class AskMetrics(msgspec.Struct, frozen=True, tag="metrics"):
    """Answered with a `ProcessDump`."""


class AskLoad(msgspec.Struct, frozen=True, tag="load"):
    """Answered with the number of requests that are being answered."""


class AskStats(msgspec.Struct, frozen=True, tag="stats"):
    """Answered with what was counted for the log since it was asked last."""


class ResetMediaCaches(msgspec.Struct, frozen=True, tag="reset_media"):
    """Read and prepare media anew."""


_Question = TellNotice | AskMetrics | AskLoad | AskStats | ResetMediaCaches
_QUESTIONS: msgspec.msgpack.Decoder[_Question] = msgspec.msgpack.Decoder(_Question)


class Siblings(OtherProcesses):
    """The other front ends of the server; and the answers of this one to them."""

    def __init__(
        self,
        front_end: FrontEnd,
        state: ServerState,
        metrics: Metrics,
        clients: Callable[[], Mapping[int, EngineClient]],
    ) -> None:
        """`clients`: gives those of the engine that all share, by the ranks of its cores."""
        self._front_end = front_end
        self._state = state
        self._metrics = metrics
        self._clients = clients
        self._stats_log: StatsLog | None = None

    @property
    @override
    def count(self) -> int:
        return self._front_end.count - 1

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """A context in which this front end answers the others."""
        path = self._socket_of(self._front_end.index)
        path.unlink(missing_ok=True)  # that of a process that had the same number
        server = await asyncio.start_unix_server(self._serve, path)
        try:
            yield
        finally:
            server.close()

    async def tell(self, rank: int, notice: Notice) -> None:
        """Tell them a notice about a core, and wait until they have heeded it."""
        await self._ask_all(TellNotice(rank, notice), _HEEDING)

    @override
    async def in_flight(self) -> int:
        return sum(msgspec.msgpack.decode(answer, type=int) for answer in await self._ask_all(AskLoad(), _PATIENCE))

    @override
    async def reset_media_caches(self) -> None:
        await self._ask_all(ResetMediaCaches(), _PATIENCE)

    def write_stats(self, log: StatsLog, interval: float) -> Coroutine[Any, Any, None] | None:
        """Return what writes the log of the engine; None: another front end does, and asks this one for its part."""
        self._stats_log = log
        return None if self._front_end.index else log.write_regularly(interval, self._stats)

    async def _stats(self) -> list[StatsCounts]:
        answers = await self._ask_all(AskStats(), _PATIENCE)
        return [msgspec.msgpack.decode(answer, type=StatsCounts) for answer in answers]

    async def metrics(self) -> list[Metric]:
        """Return the metrics of all front ends, added up, those included that have ended."""
        answers = await self._ask_all(AskMetrics(), _PATIENCE)
        front_end = self._front_end
        here = ProcessDump.of(front_end.identity, front_end.index, self._metrics.collect())
        kept = self._dump()

        def merge() -> list[Metric]:
            others = [msgspec.msgpack.decode(answer, type=ProcessDump) for answer in answers]
            return merged([here, *others, *self._keep([kept, *others])])

        return await asyncio.to_thread(merge)

    def _dump(self) -> ProcessDump:
        front_end = self._front_end
        return ProcessDump.of(front_end.identity, front_end.index, self._metrics.of_this_process())

    def _keep(self, dumps: Sequence[ProcessDump]) -> list[ProcessDump]:
        """Keep the dumps of processes for the time after their end, and return those of processes that have ended.

        What one has counted after it was asked last is lost. So no sum falls that somebody has seen.
        """
        folder = self._front_end.folder
        identities = {dump.identity for dump in dumps}
        for dump in dumps:
            temporary = folder / f".metrics-{self._front_end.identity}-{os.urandom(4).hex()}"
            temporary.write_bytes(msgspec.msgpack.encode(dump))
            temporary.replace(folder / f"metrics-{dump.identity}")
        ended = []
        for path in folder.glob("metrics-*"):
            if path.name.removeprefix("metrics-") not in identities:
                dump = msgspec.msgpack.decode(path.read_bytes(), type=ProcessDump)
                ended.append(msgspec.structs.replace(dump, has_ended=True))
        return ended

    def _socket_of(self, index: int) -> Path:
        return self._front_end.folder / f"front-{index}"

    async def _ask_all(self, question: _Question, seconds: float) -> list[bytes]:
        """Ask all others; returns the answers of those that are there, and answer in time."""
        front_end = self._front_end
        asked = [self._ask(index, question, seconds) for index in range(front_end.count) if index != front_end.index]
        return [answer for answer in await asyncio.gather(*asked) if answer is not None]

    async def _ask(self, index: int, question: _Question, seconds: float) -> bytes | None:
        with suppress(OSError, TimeoutError, EOFError):  # it has ended, or does not serve yet
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_unix_connection(self._socket_of(index))
                try:
                    writer.write(msgspec.msgpack.encode(question))
                    writer.write_eof()
                    answer = await reader.read()
                finally:
                    writer.close()
            return answer or None
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(await self._answer(_QUESTIONS.decode(await reader.read())))
            await writer.drain()
        except (OSError, msgspec.MsgspecError) as error:
            logger.error("a question of another front end was not answered: %s", error)
        finally:
            writer.close()

    async def _answer(self, question: _Question) -> bytes:
        match question:
            case TellNotice(rank=rank, notice=notice):
                if (client := self._clients().get(rank)) is not None:  # else this one has sent nothing there
                    await client.heed(notice)
                return msgspec.msgpack.encode(True)
            case AskMetrics():
                return msgspec.msgpack.encode(self._dump())
            case AskLoad():
                return msgspec.msgpack.encode(self._state.in_flight)
            case AskStats():
                return msgspec.msgpack.encode(StatsCounts() if self._stats_log is None else self._stats_log.take())
            case ResetMediaCaches():
                for model in self._state.models:
                    model.reset_media_cache()
                return msgspec.msgpack.encode(True)


@dataclass(frozen=True, slots=True)
class _SiblingsOfCore(EngineSiblings):
    """The clients of a core in the other front ends."""

    siblings: Siblings
    rank: int

    @override
    async def tell(self, notice: Notice) -> None:
        await self.siblings.tell(self.rank, notice)


def open_siblings(
    front_end: FrontEnd, state: ServerState, metrics: Metrics, running: Sequence[RunningModel]
) -> Siblings:
    """Return the other front ends, of which the endpoints and the client of the engine know from now on."""
    (model,) = running
    assert isinstance(model, ModelBeforeSharedCores)
    siblings = Siblings(front_end, state, metrics, lambda: model.clients)
    model.use_siblings(partial(_SiblingsOfCore, siblings))
    state.others = siblings
    return siblings
