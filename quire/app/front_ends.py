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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from quire.app.core_process import serve_core_in_process
from quire.app.cores import with_max_model_len
from quire.app.engines import core_config
from quire.app.exits import end_process, handling_signals
from quire.app.front_end import (
    TABLES,
    CoreEnded,
    CoreStarted,
    FrontEnd,
    Listens,
    OtherEnded,
    Signalled,
    ToFrontEnd,
    start_shared_model,
)
from quire.app.lifecycle import serve
from quire.app.logs import flush_logs, start_logging_in_copy
from quire.app.models import ModelSource
from quire.config.commands import Serve
from quire.config.options import LogOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.client.launch import (
    LAST_MESSAGES,
    PreparedProcess,
    ProcessCore,
    end_with_parent,
    kill_processes,
    reason_of,
    show_name,
)
from quire.engine.client.shared_channel import PARENT, FrontEndChannel, identity_of
from quire.engine.models.config_reader import ConfigReader
from quire.engine.models.errors import ModelError
from quire.otlp.settings import OtlpSettingsError, trace_settings
from quire.realtime.secrets import new_key
from quire.workers.shared_counts import SharedCounts

logger = logging.getLogger("quire")
_ATTEMPTS = 5
_FIRST_DELAY = 1.0  # seconds before the second restart; doubles with each attempt
_STABLE_AFTER = 300.0  # seconds; what has run for so long starts again with the first attempt
_GRACE = 7.0  # seconds from the time when running requests are aborted until a front end is ended by force
_STOP_TIMEOUT = 2.0  # seconds for the engine, once all front ends have ended
_FORK = multiprocessing.get_context("fork")


@dataclass(slots=True)
class _Restarts:
    """When something that dies is started again: with a growing delay, so that it does not keep the machine busy.

    Attributes:
        due: when it is started; None: it runs, or is not started again.
    """

    started: float = field(default_factory=time.monotonic)
    attempt: int = 0
    due: float | None = None

    def plan(self, first_delay: float) -> bool:
        """Plan the next start; returns whether there is one."""
        now = time.monotonic()
        if now - self.started > _STABLE_AFTER:
            self.attempt = 0
        self.attempt += 1
        delay = first_delay if self.attempt == 1 else _FIRST_DELAY * 2 ** (self.attempt - 2) + first_delay
        self.due = now + delay if self.attempt <= _ATTEMPTS else None
        return self.due is not None

    def begin(self) -> None:
        """Note that it is started now."""
        self.started, self.due = time.monotonic(), None


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
    restarts: _Restarts = field(default_factory=_Restarts)
    generation: int = 0
    process: BaseProcess | None = None
    connection: Connection | None = None
    listens: bool = False


class FrontEnds:
    """All front ends of a server, and its engine."""

    def __init__(
        self,
        settings: Serve,
        source: ModelSource,
        config: CoreConfig,
        sockets: Sequence[list[socket.socket]],
        prepared: PreparedProcess | None,
    ) -> None:
        """Start the engine, which loads the model. `sockets`: of each front end. `prepared`: the engine's process."""
        self._settings = settings
        self._source = source
        self._config = config
        self._counts = SharedCounts(len(sockets), len(TABLES))
        self._secret_key = new_key()
        self._core = ProcessCore(name=f"quire-engine-{config.replica}", prepared=prepared)
        self._folder = self._core.folder  # of the first engine, which the sockets of front ends are in as well
        self._core_process: BaseProcess | None = self._core.launch(self._core_entry())
        self._core_restarts = _Restarts()
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
            self._end_core()
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
            address=self._core.address,
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
        settings = front_end.divided(self._settings)
        start = partial(start_shared_model, settings, [self._source], front_end)
        end_process(serve(settings, start, self._children[front_end.index].sockets, front_end))

    def _core_entry(self) -> Callable[[str], None]:
        settings = self._settings
        traces = trace_settings(settings.otlp_traces_endpoint, os.environ) if settings.collect_detailed_traces else None
        return partial(serve_core_in_process, self._config, LogOptions.of(settings), traces)

    def _wait(self) -> None:
        """Wait for the next event, and handle what has happened."""
        sentinels = {child.process.sentinel: child for child in self._children if child.process is not None}
        connections = {child.connection: child for child in self._children if child.connection is not None}
        core = [] if self._core_process is None else [self._core_process.sentinel]
        for ready in wait([self._wakes[0], *sentinels, *connections, *core], self._seconds_until_due()):
            if ready == self._wakes[0]:
                self._handle_signals(os.read(self._wakes[0], 64))
            elif isinstance(ready, Connection):
                if connections[ready].connection is ready:  # else its process has just been found to have ended
                    self._read(connections[ready], ready)
            elif ready in sentinels:
                self._reap(sentinels[ready])
            else:
                self._reap_core()
        self._do_what_is_due()

    def _seconds_until_due(self) -> float | None:
        times = [self._core_restarts.due, self._kill_at]
        if self._core_process is not None:  # else front ends are started after it
            times += [child.restarts.due for child in self._children]
        due = [at for at in times if at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            logger.error("the front ends did not stop in time: they are ended by force")
            self._kill_all()
        if self._core_restarts.due is not None and now >= self._core_restarts.due:
            self._restart_core()
        for child in self._children if self._core_process is not None else ():
            if child.restarts.due is not None and now >= child.restarts.due:
                self._start(child)

    def _read(self, child: _Child, connection: Connection) -> None:
        """Read what a front end says."""
        try:
            listens = msgspec.msgpack.decode(connection.recv_bytes(), type=Listens)
        except (EOFError, OSError):  # its process ends
            connection.close()
            child.connection = None
            return
        child.listens = True
        if listens.max_model_len is not None and not self._core_restarts.attempt:
            self._config = with_max_model_len(self._config, listens.max_model_len)

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
        self._tell_all(OtherEnded(identity_of(child.index, child.generation)))
        if self._is_ending:
            self._status = self._status or (1 if status < 0 else status)
            for bound in child.sockets:  # so that clients are refused which nobody would serve
                bound.close()
        elif not child.listens and child.generation == 1:  # the others will end as well, and say why
            logger.error("front end %d ended with status %d at its start", child.index, status)
            self._status = status if status > 0 else 1
            self._kill_at = time.monotonic() + _STOP_TIMEOUT
        elif child.restarts.plan(0.0):
            logger.warning("front end %d ended with status %d; it is started again", child.index, status)
        else:
            logger.error("front end %d ended with status %d again: the server stops", child.index, status)
            self._status = 1
            self._end(signal.SIGTERM)

    def _reap_core(self) -> None:
        """Handle the end of the engine's process."""
        process = self._core_process
        assert process is not None
        self._core_process = None
        process.join()
        if self._is_ending:
            return
        was_killed = (process.exitcode or 0) < 0  # else it has told the reason, which takes a moment to arrive
        has_served = all(child.listens or child.generation > 1 for child in self._children)
        can_restart = self._settings.on_engine_death == "restart" and has_served
        restarts = can_restart and self._core_restarts.plan(_FIRST_DELAY + (0.0 if was_killed else LAST_MESSAGES))
        reason = reason_of(process)
        if restarts:
            reason = f"{reason}. It is being restarted (attempt {self._core_restarts.attempt} of {_ATTEMPTS})."
            logger.warning("the engine has stopped: %s", reason)
        else:
            self._status = 1
            self._kill_at = time.monotonic() + self._settings.shutdown_timeout + _GRACE
        if not was_killed:
            time.sleep(LAST_MESSAGES)
        self._tell_all(CoreEnded(reason, restarts=restarts))

    def _restart_core(self) -> None:
        self._core_restarts.begin()
        before = self._core
        self._core = ProcessCore(name=f"quire-engine-{self._config.replica}")
        self._core_process = self._core.launch(self._core_entry())
        self._tell_all(CoreStarted(self._core.address))
        if before.folder != self._folder:  # that of the first one has the sockets of front ends
            before.end(0.0)

    def _end_core(self) -> None:
        """End the engine, which serves nobody any more."""
        if self._core_process is not None:
            FrontEndChannel(self._core.address, PARENT).send_last()
        self._core.end(_STOP_TIMEOUT if self._core_process is not None else 0.0)
        shutil.rmtree(self._folder, ignore_errors=True)

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
        self._core_restarts.due = None
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
        config = replace(config, replica=settings.first_replica, front_ends=settings.api_server_count)
        front_ends = FrontEnds(settings, source, config, sockets, prepared)
    except (ModelError, OtlpSettingsError) as error:
        logger.error("cannot serve: %s", error)
        return 1
    multiprocessing.active_children()  # reaps the process that has read the configs: nobody waits for it
    gc.collect()
    gc.freeze()  # the pages of what is imported stay those of all copies
    gc.enable()
    return front_ends.run()
