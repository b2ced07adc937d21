"""SharedCores: the engine of several front ends, one core or replicas, as the parent of all processes sees it.

It starts cores, starts again those that die, and changes their number. It has no event loop: whoever owns it waits for
the ends of processes and for what front ends say, and tells it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from quire.app.core_process import serve_core_in_process
from quire.app.cores import with_max_model_len
from quire.app.engines import weight_bytes
from quire.app.front_end_notes import (
    CatchUp,
    CoreEnded,
    CoreEntered,
    CoreSeat,
    CoresLeave,
    CoresRemoved,
    CoreStarted,
    Listens,
    Scale,
    Scaled,
    Scaling,
    ToFrontEnd,
)
from quire.app.models import ModelSource
from quire.app.placement import gpus_of_replicas, memory_of_replicas, replica_places
from quire.config.commands import Serve
from quire.config.options import LogOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.client.launch import EVERYWHERE, LAST_MESSAGES, PreparedProcess, ProcessCore, ProcessPlace, reason_of
from quire.engine.client.shared_channel import PARENT, FrontEndChannel
from quire.engine.execution.memory import MemoryShare
from quire.engine.models.errors import UnavailableDevice
from quire.otlp.settings import trace_settings

logger = logging.getLogger("quire")
_ATTEMPTS = 5
_FIRST_DELAY = 1.0  # seconds before the second restart; doubles with each attempt
_STABLE_AFTER = 300.0  # seconds; what has run for so long starts again with the first attempt
_PAUSE = 60.0  # seconds until a replica that could not be started is tried again, while others run
_STOP_TIMEOUT = 2.0  # seconds for a core that is told to end


@dataclass(slots=True)
class Restarts:
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

    def pause(self, seconds: float) -> None:
        """Plan a start as the first one, after some time."""
        self.attempt, self.due = 0, time.monotonic() + seconds

    def begin(self) -> None:
        """Note that it is started now."""
        self.started, self.due = time.monotonic(), None


@dataclass(slots=True, eq=False)
class _Seat:
    """A replica, or the only core, as the parent sees it.

    Attributes:
        process: None: it does not run.
        death: why it does not.
        has_entered: it may get requests.
        loaded_in: the front ends that have seen that it is loaded.
        guide: the front end that makes it as the other replicas are.
    """

    rank: int
    config: CoreConfig
    place: ProcessPlace
    core: ProcessCore
    process: BaseProcess | None = None
    restarts: Restarts = field(default_factory=Restarts)
    death: str | None = None
    has_entered: bool = True
    is_leaving: bool = False
    loaded_in: set[int] = field(default_factory=set)
    guide: int | None = None

    @property
    def is_live(self) -> bool:
        return self.process is not None and self.has_entered


@dataclass(slots=True)
class _Change:
    """A change of the number of replicas.

    Attributes:
        index: the front end that has asked for it.
        added: replicas that are being started.
        leaving: replicas whose requests are to end.
        drained: front ends that have no requests there.
        latest: when these have to have ended.
    """

    index: int
    added: list[_Seat] = field(default_factory=list)
    leaving: list[_Seat] = field(default_factory=list)
    drained: set[int] = field(default_factory=set)
    latest: float | None = None


class Fronts(Protocol):
    """The front ends before the cores."""

    @property
    def running_fronts(self) -> Sequence[int]:
        """The numbers of those that have a process."""

    @property
    def have_served(self) -> bool:
        """Whether all have answered requests."""

    def tell(self, index: int, note: ToFrontEnd) -> None:
        """Tell one of them."""

    def give_up(self) -> None:
        """No core runs, and none will: the server stops."""


class SharedCores:
    """The cores of a model.

    Attributes:
        folder: of the sockets of the first one, in which those of front ends are as well.
    """

    def __init__(
        self, settings: Serve, source: ModelSource, config: CoreConfig, fronts: Fronts, prepared: PreparedProcess | None
    ) -> None:
        """Start them; they load the model. `prepared`: the process of the only one.

        Raises:
            UnavailableDevice: there are not enough GPUs.
        """
        self._settings = settings
        self._config = config
        self._fronts = fronts
        self._weight_bytes = weight_bytes(source)
        self._gpus = gpus_of_replicas(settings.device) if settings.has_replicas else None
        self._cache_bytes = 0
        self._change: _Change | None = None
        self._ending: list[tuple[_Seat, float]] = []  # and when they are ended by force
        self._is_ending = False
        self._seats: list[_Seat] = []
        places = replica_places(settings, settings.replicas, self._gpus) if settings.has_replicas else [EVERYWHERE]
        share = self._share(len(places))
        for rank, place in enumerate(places, settings.first_replica):
            self._seats.append(self._new_seat(rank, place, share, prepared))
        self.folder: Path = self._seats[0].core.folder

    def _share(self, added: int) -> MemoryShare | None:
        if not self._settings.has_replicas or self._gpus is not None:
            return None
        return memory_of_replicas(added, self._cache_bytes * len(self._seats), self._weight_bytes)

    def _new_seat(
        self, rank: int, place: ProcessPlace, share: MemoryShare | None, prepared: PreparedProcess | None = None
    ) -> _Seat:
        sharers = self._settings.replicas
        config = replace(self._config, memory_share=share, replica=rank, sharers=sharers)
        core = ProcessCore(place, name=f"quire-engine-{rank}", prepared=prepared)
        seat = _Seat(rank, config, place, core)
        seat.process = core.launch(self._entry(seat))
        return seat

    def _entry(self, seat: _Seat) -> Callable[[str], None]:
        settings = self._settings
        traces = trace_settings(settings.otlp_traces_endpoint, os.environ) if settings.collect_detailed_traces else None
        return partial(serve_core_in_process, seat.config, LogOptions.of(settings), traces)

    @property
    def seats(self) -> list[CoreSeat]:
        """All cores, for a front end that is started."""
        return [
            CoreSeat(seat.rank, seat.core.address, seat.has_entered, seat.is_leaving, seat.death)
            for seat in self._seats
        ]

    @property
    def can_start_fronts(self) -> bool:
        """Whether front ends can start: before replicas they wait for the first one that runs."""
        return self._settings.has_replicas or self._seats[0].process is not None

    @property
    def sentinels(self) -> dict[int, Callable[[], None]]:
        """What to do when processes end, by what is ready then."""
        seats = [*self._seats, *(seat for seat, _ in self._ending)]
        return {seat.process.sentinel: partial(self._reap, seat) for seat in seats if seat.process is not None}

    def times(self) -> Iterator[float]:
        """When something is due."""
        yield from (seat.restarts.due for seat in self._seats if seat.restarts.due is not None)
        yield from (latest for _, latest in self._ending)
        if self._change is not None and self._change.latest is not None:
            yield self._change.latest

    def do_what_is_due(self) -> None:
        """Start what is to be started again, and end what has had its time."""
        now = time.monotonic()
        for seat in self._seats:
            if seat.restarts.due is not None and now >= seat.restarts.due:
                self._restart(seat)
        for seat, latest in self._ending:
            if seat.process is not None and now >= latest:
                seat.process.kill()
        change = self._change
        if change is not None and change.latest is not None and now >= change.latest:
            self._abandon(change, Scaled("requests have not ended", timed_out=True))

    def stop_restarts(self) -> None:
        """Start none again: the server ends."""
        self._is_ending = True
        for seat in self._seats:
            seat.restarts.due = None

    def end(self) -> None:
        """End all, which serve nobody any more."""
        for seat in self._seats:
            if seat.process is not None:
                FrontEndChannel(seat.core.address, PARENT).send_last()
        for seat in (*self._seats, *(seat for seat, _ in self._ending)):
            seat.core.end(_STOP_TIMEOUT if seat.process is not None else 0.0)

    def listens(self, listens: Listens) -> None:
        """Let cores that are started later have the context that requests are checked for."""
        self._cache_bytes = listens.cache_bytes
        if listens.max_model_len is not None and not any(seat.restarts.attempt for seat in self._seats):
            self._config = with_max_model_len(self._config, listens.max_model_len)
            for seat in self._seats:
                seat.config = with_max_model_len(seat.config, listens.max_model_len)

    def front_end_ended(self, index: int) -> None:
        """Do without a front end that has ended."""
        for seat in self._seats:
            seat.loaded_in.discard(index)
            if seat.guide == index:
                seat.guide = None
        if self._change is not None:
            self._change.drained.discard(index)
            if self._change.index == index:
                self._abandon(self._change, None)
        self._go_on()

    def loaded(self, index: int, rank: int) -> None:
        """A front end has seen that a core is loaded."""
        for seat in self._seats:
            if seat.rank == rank and not seat.has_entered:
                seat.loaded_in.add(index)
        self._go_on()

    def caught_up(self, index: int, rank: int) -> None:
        """A front end has made a core as the others are."""
        for seat in self._seats:
            if seat.rank == rank and seat.guide == index:
                seat.has_entered, seat.guide = True, None
                self._tell_all(CoreEntered(rank))
        change = self._change
        if change is not None and change.added and all(seat.has_entered for seat in change.added):
            self._finish(change, Scaled())

    def end_core(self, rank: int, reason: str) -> None:
        """End a core that is to be started again."""
        for seat in self._seats:
            if seat.rank == rank and seat.process is not None and seat.process.is_alive():
                logger.warning("replica %d is ended: %s", rank, reason)
                seat.process.kill()

    def _go_on(self) -> None:
        """Do what can be done now that a front end has said something, or has ended."""
        change, fronts = self._change, self._fronts.running_fronts
        if not fronts:
            return
        for seat in self._seats:
            waits = change.added if change is not None and seat in change.added else [seat]
            are_loaded = all(waiting.loaded_in.issuperset(fronts) for waiting in waits)
            if not seat.has_entered and seat.process is not None and seat.guide is None and are_loaded:
                seat.guide = fronts[0]
                self._fronts.tell(seat.guide, CatchUp(seat.rank))
        if change is not None and change.leaving and change.drained.issuperset(fronts):
            self._remove(change.leaving)
            self._finish(change, Scaled())

    def _reap(self, seat: _Seat) -> None:
        """Handle the end of the process of a core."""
        process = seat.process
        assert process is not None
        seat.process = None
        process.join()
        if seat not in self._seats:  # it was removed
            self._ending = [(ending, latest) for ending, latest in self._ending if ending is not seat]
            seat.core.end(0.0)
            return
        if self._is_ending:
            return
        was_killed = (process.exitcode or 0) < 0  # else it has told the reason, which takes a moment to arrive
        if not was_killed:
            time.sleep(LAST_MESSAGES)
        seat.loaded_in.clear()
        seat.guide = None
        seat.death = death = reason_of(process)
        change = self._change
        if change is not None and seat in change.added and not seat.has_entered:
            self._tell_all(CoreEnded(seat.rank, death, restarts=True))  # so that front ends know what it has told
            self._abandon(change, Scaled(f"A replica could not be started: {death}"))
            return
        seat.has_entered = False
        restarts = self._plan_restart(seat)
        if restarts:
            logger.warning("the engine has stopped: %s", seat.death)
        self._tell_all(CoreEnded(seat.rank, seat.death, restarts=restarts))
        if not restarts:
            self._fronts.give_up()
        self._go_on()

    def _plan_restart(self, seat: _Seat) -> bool:
        """Plan when a core is started again; returns whether it is."""
        others_run = any(other.is_live for other in self._seats)
        if not self._fronts.have_served or not (others_run or self._settings.on_engine_death == "restart"):
            return False
        if seat.restarts.plan(_FIRST_DELAY):
            seat.death = f"{seat.death}. It is being restarted (attempt {seat.restarts.attempt} of {_ATTEMPTS})."
            return True
        if others_run:
            logger.error("replica %d cannot be started; next attempt in %.0f s: %s", seat.rank, _PAUSE, seat.death)
            seat.restarts.pause(_PAUSE)
        return others_run

    def _restart(self, seat: _Seat) -> None:
        seat.restarts.begin()
        before = seat.core
        seat.core = ProcessCore(seat.place, name=f"quire-engine-{seat.rank}")
        seat.process = seat.core.launch(self._entry(seat))
        seat.death = None
        seat.has_entered = not self._settings.has_replicas  # a core that is alone has nothing to catch up with
        self._tell_all(CoreStarted(seat.rank, seat.core.address))
        if before.folder != self.folder:  # that of the first one has the sockets of front ends
            before.end(0.0)

    def scale(self, index: int, scale: Scale) -> None:
        """Change the number of replicas, for a front end, which is told of the end."""
        if self._change is not None:
            self._fronts.tell(index, Scaled("The number of replicas is being changed already."))
            return
        self._change = change = _Change(index)
        self._tell_all(Scaling(is_scaling=True))
        if scale.size > len(self._seats):
            self._grow(change, scale.size)
        elif scale.size < len(self._seats):
            change.leaving = self._seats[scale.size :]
            change.latest = time.monotonic() + scale.drain_timeout
            for seat in change.leaving:
                seat.is_leaving = True
            self._tell_all(CoresLeave([seat.rank for seat in change.leaving], is_leaving=True))
        else:
            self._finish(change, Scaled())

    def _grow(self, change: _Change, size: int) -> None:
        try:
            places = replica_places(self._settings, size, self._gpus)[len(self._seats) :]
        except UnavailableDevice as error:
            self._finish(change, Scaled(f"{error}."))
            return
        share = self._share(len(places))
        for place in places:
            seat = self._new_seat(self._settings.first_replica + len(self._seats), place, share)
            seat.has_entered = False
            self._seats.append(seat)
            change.added.append(seat)
            self._tell_all(CoreStarted(seat.rank, seat.core.address))

    def drained(self, index: int) -> None:
        """A front end has no requests in the cores that leave."""
        if self._change is not None:
            self._change.drained.add(index)
        self._go_on()

    def give_up_scaling(self, index: int) -> None:
        """The client of a front end that has asked for a change has gone."""
        if self._change is not None and self._change.index == index:
            self._abandon(self._change, None)

    def _abandon(self, change: _Change, answer: Scaled | None) -> None:
        """Leave the number of replicas as it was."""
        if change.leaving:
            for seat in change.leaving:
                seat.is_leaving = False
            self._tell_all(CoresLeave([seat.rank for seat in change.leaving], is_leaving=False))
        if change.added:
            self._remove(change.added)
        self._finish(change, answer)

    def _finish(self, change: _Change, answer: Scaled | None) -> None:
        self._change = None
        self._tell_all(Scaling(is_scaling=False))
        if answer is not None:
            if answer.error is None:
                logger.info("there are %d replicas now", len(self._seats))
            self._fronts.tell(change.index, answer)

    def _remove(self, removed: Sequence[_Seat]) -> None:
        """Remove cores, which have no requests."""
        self._seats = [seat for seat in self._seats if seat not in removed]
        self._tell_all(CoresRemoved([seat.rank for seat in removed]))
        for seat in removed:
            if seat.process is None:
                seat.core.end(0.0)
            else:
                FrontEndChannel(seat.core.address, PARENT).send_last()
                self._ending.append((seat, time.monotonic() + _STOP_TIMEOUT))

    def _tell_all(self, note: ToFrontEnd) -> None:
        for index in self._fronts.running_fronts:
            self._fronts.tell(index, note)
