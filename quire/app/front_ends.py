"""The parent of several front ends: starts them and the engine, starts again what dies, and ends all together.

It has no event loop, and no thread but the one that writes its log, so that a front end is a copy of it, with all that
it has imported, at any time. A supervisor sends signals to all processes; the front ends and the engine ignore them,
and the parent says what they mean.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec
from typing_extensions import override

from quire.app.engines import core_config
from quire.app.exits import end_process, handling_signals
from quire.app.front_end import TABLES, FrontEnd
from quire.app.front_end_notes import (
    CaughtUp,
    CoreLoaded,
    Drained,
    EndCore,
    FromFrontEnd,
    GiveUpScaling,
    Listens,
    OtherEnded,
    Scale,
    Signalled,
    ToFrontEnd,
)
from quire.app.lifecycle import serve
from quire.app.logs import flush_logs, start_logging_in_copy
from quire.app.models import ModelSource
from quire.app.running_models import StepTraces
from quire.app.shared_cores import Fronts, Restarts, SharedCores
from quire.app.shared_model import ModelBeforeSharedCores, SharedModel
from quire.config.commands import Serve
from quire.engine.build.core_config import CoreConfig
from quire.engine.client.launch import PreparedProcess, end_with_parent, kill_processes, show_name
from quire.engine.client.replicas.shared_dispatch import SharedDispatch
from quire.engine.client.shared_channel import identity_of
from quire.engine.models.config_reader import ConfigReader
from quire.engine.models.errors import ModelError
from quire.otlp.settings import OtlpSettingsError
from quire.realtime.secrets import new_key
from quire.workers.shared_counts import SharedCounts

logger = logging.getLogger("quire")
_GRACE = 7.0  # seconds from the time when running requests are aborted until a front end is ended by force
_END_AT_START = 2.0  # seconds for the others, if a front end cannot start
_NOTES: msgspec.msgpack.Decoder[FromFrontEnd] = msgspec.msgpack.Decoder(FromFrontEnd)
_FORK = multiprocessing.get_context("fork")


@dataclass(slots=True)
class _Child:
    """A front end as its parent sees it.

    Attributes:
        sockets: on which it listens. They stay open, so that its next process gets the clients that wait there.
        generation: how many processes it has had.
        process: None: it has ended.
        listens: it has answered requests.
    """

    index: int
    sockets: list[socket.socket]
    restarts: Restarts = field(default_factory=Restarts)
    generation: int = 0
    process: BaseProcess | None = None
    connection: Connection | None = None
    listens: bool = False


class FrontEnds(Fronts):
    """All front ends of a server, and its engine."""

    def __init__(
        self,
        settings: Serve,
        source: ModelSource,
        config: CoreConfig,
        sockets: Sequence[list[socket.socket]],
        prepared: PreparedProcess | None,
    ) -> None:
        """Start the engine, which loads the model. `sockets`: of each front end. `prepared`: the engine's process.

        Raises:
            UnavailableDevice: there are not enough GPUs for its replicas.
        """
        self._settings = settings
        self._source = source
        self._counts = SharedCounts(len(sockets), len(TABLES))
        self._dispatch = SharedDispatch(len(sockets)) if settings.has_replicas else None
        self._secret_key = new_key()
        self._cores = SharedCores(settings, source, config, self, prepared)
        self._folder = self._cores.folder
        self._children = [_Child(index, bound) for index, bound in enumerate(sockets)]
        self._signals = 0
        self._wakes = os.pipe()
        self._kill_at: float | None = None
        self._status = 0

    def run(self) -> int:
        """Run until all have ended; returns the status of the server."""
        with handling_signals(self._on_signal):
            for child in self._children:
                self._start(child)
            while self._running:
                self._wait()
            self._cores.end()
            shutil.rmtree(self._folder, ignore_errors=True)
        for end in self._wakes:
            os.close(end)
        self._counts.close()
        return self._status

    @property
    def _running(self) -> list[_Child]:
        return [child for child in self._children if child.process is not None or child.restarts.due is not None]

    @property
    def _is_ending(self) -> bool:
        return self._kill_at is not None

    def _start(self, child: _Child) -> None:
        """Start the next process of a front end."""
        child.generation += 1
        child.restarts.begin()
        child.listens = False
        ours, theirs = multiprocessing.Pipe()
        front_end = FrontEnd(
            index=child.index,
            generation=child.generation,
            count=len(self._children),
            counts=self._counts,
            secret_key=self._secret_key,
            folder=self._folder,
            cores=self._cores.seats,
            dispatch=self._dispatch,
            connection=theirs,
        )
        child.connection = ours
        process = _FORK.Process(target=self._run_front_end, args=(front_end,), name=f"quire-front-{child.index}")
        flush_logs()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        child.process = process
        theirs.close()

    def _run_front_end(self, front_end: FrontEnd) -> NoReturn:
        """Body of the process of a front end, which is a copy of this one."""
        start_logging_in_copy(self._settings.log_level, self._settings.log_format)
        show_name()
        end_with_parent(partial(_clean_up, self._folder))
        for child in self._children:
            if child.index != front_end.index:
                for bound in child.sockets:
                    bound.close()
            if child.connection is not None:
                child.connection.close()
        for end in self._wakes:
            os.close(end)
        self._counts.use(front_end.index)
        if self._dispatch is not None:
            self._dispatch.use(front_end.index)
        settings = front_end.divided(self._settings)
        start = partial(start_shared_model, settings, [self._source], front_end)
        end_process(serve(settings, start, self._children[front_end.index].sockets, front_end))

    def _wait(self) -> None:
        """Wait for the next event, and handle what has happened."""
        sentinels = {child.process.sentinel: child for child in self._children if child.process is not None}
        connections = {child.connection: child for child in self._children if child.connection is not None}
        cores = self._cores.sentinels
        for ready in wait([self._wakes[0], *sentinels, *connections, *cores], self._seconds_until_due()):
            if ready == self._wakes[0]:
                self._handle_signals(os.read(self._wakes[0], 64))
            elif isinstance(ready, Connection):
                if connections[ready].connection is ready:  # else its process has just been found to have ended
                    self._read(connections[ready], ready)
            elif ready in sentinels:
                self._reap(sentinels[ready])
            elif isinstance(ready, int) and ready in cores:
                cores[ready]()
        self._do_what_is_due()

    def _seconds_until_due(self) -> float | None:
        times = [self._kill_at, *self._cores.times()]
        if self._cores.can_start_fronts:  # else front ends are started after it
            times += [child.restarts.due for child in self._children]
        due = [at for at in times if at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            logger.error("the front ends did not stop in time: they are ended by force")
            self._kill_all()
        self._cores.do_what_is_due()
        for child in self._children if self._cores.can_start_fronts else ():
            if child.restarts.due is not None and now >= child.restarts.due:
                self._start(child)

    def _read(self, child: _Child, connection: Connection) -> None:
        """Read what a front end says."""
        try:
            note = _NOTES.decode(connection.recv_bytes())
        except (EOFError, OSError):  # its process ends
            connection.close()
            child.connection = None
            return
        cores = self._cores
        match note:
            case Listens():
                child.listens = True
                cores.listens(note)
            case CoreLoaded(rank=rank):
                cores.loaded(child.index, rank)
            case CaughtUp(rank=rank):
                cores.caught_up(child.index, rank)
            case EndCore(rank=rank, reason=reason):
                cores.end_core(rank, reason)
            case Drained():
                cores.drained(child.index)
            case Scale():
                cores.scale(child.index, note)
            case GiveUpScaling():
                cores.give_up_scaling(child.index)

    @property
    @override
    def running_fronts(self) -> Sequence[int]:
        return [child.index for child in self._children if child.process is not None]

    @property
    @override
    def have_served(self) -> bool:
        return all(child.listens or child.generation > 1 for child in self._children)

    @override
    def tell(self, index: int, note: ToFrontEnd) -> None:
        self._tell(self._children[index], note)

    @override
    def give_up(self) -> None:
        self._status = 1
        self._kill_at = time.monotonic() + self._settings.shutdown_timeout + _GRACE

    def _tell(self, child: _Child, note: ToFrontEnd) -> None:
        if child.connection is not None:
            with suppress(OSError):  # it has just ended
                child.connection.send_bytes(msgspec.msgpack.encode(note))

    def _tell_all(self, note: ToFrontEnd) -> None:
        for child in self._children:
            self._tell(child, note)

    def _reap(self, child: _Child) -> None:
        """Handle the end of the process of a front end."""
        assert child.process is not None
        child.process.join()
        status = child.process.exitcode or 0
        child.process = None
        if child.connection is not None:
            child.connection.close()
            child.connection = None
        self._counts.clear(child.index)
        if self._dispatch is not None:
            self._dispatch.clear(child.index)
        self._tell_all(OtherEnded(identity_of(child.index, child.generation)))
        self._cores.front_end_ended(child.index)
        if self._is_ending:
            self._status = self._status or (1 if status < 0 else status)
            for bound in child.sockets:  # so that clients are refused which nobody would serve
                bound.close()
        elif not child.listens and child.generation == 1:  # the others will end as well, and say why
            logger.error("front end %d ended with status %d at its start", child.index, status)
            self._status = status if status > 0 else 1
            self._kill_at = time.monotonic() + _END_AT_START
        elif child.restarts.plan(0.0):
            logger.warning("front end %d ended with status %d; it is started again", child.index, status)
        else:
            logger.error("front end %d ended with status %d again: the server stops", child.index, status)
            self._status = 1
            self._end(signal.SIGTERM)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        os.write(self._wakes[1], bytes([number]))

    def _handle_signals(self, numbers: bytes) -> None:
        settings = self._settings
        for number in numbers:
            if number == signal.SIGHUP and (settings.ssl_certfile is not None or settings.api_key_file is not None):
                self._tell_all(Signalled(number))
            else:
                self._end(number)

    def _end(self, number: int) -> None:
        """Let front ends drain on the first signal, abort requests on the second; kill them on the third."""
        self._signals += 1
        for child in self._children:
            child.restarts.due = None
        self._cores.stop_restarts()
        if self._signals > 2:
            self._status = 1
            self._kill_all()
            return
        if not all(child.listens for child in self._children) and number == signal.SIGINT:
            self._status = self._status or 130
        seconds = self._settings.shutdown_timeout if self._signals == 1 else 0.0
        self._kill_at = time.monotonic() + seconds + _GRACE
        self._tell_all(Signalled(number))

    def _kill_all(self) -> None:
        self._kill_at = float("inf")
        for child in self._children:
            if child.process is not None:
                child.process.kill()


def _clean_up(folder: Path) -> None:
    """Leave nothing behind when the parent has ended, and this process has to."""
    kill_processes()
    shutil.rmtree(folder, ignore_errors=True)


async def start_shared_model(
    settings: Serve, sources: Sequence[ModelSource], front_end: FrontEnd, _: StepTraces | None = None
) -> AsyncIterator[ModelBeforeSharedCores]:
    """Give the model of a front end."""
    (source,) = sources
    if settings.has_replicas:
        from quire.app.shared_replicas import SharedReplicas  # noqa: PLC0415 few servers have some

        yield SharedReplicas(source, settings, front_end)
    else:
        yield SharedModel(source, settings, front_end)


def run_front_ends(
    settings: Serve,
    source: ModelSource,
    configs: ConfigReader,
    sockets: Sequence[list[socket.socket]],
    prepared: PreparedProcess | None,
) -> int:
    """Serve a model with several front ends until a signal arrives; returns the exit status."""
    try:
        config = core_config(source, configs.next(), settings)
        config = replace(config, front_ends=settings.api_server_count)
        front_ends = FrontEnds(settings, source, config, sockets, prepared)
    except (ModelError, OtlpSettingsError) as error:
        logger.error("cannot serve: %s", error)
        return 1
    multiprocessing.active_children()  # reaps the process that has read the configs: nobody waits for it
    gc.collect()
    gc.freeze()  # the pages of what is imported stay those of all copies
    gc.enable()
    return front_ends.run()
