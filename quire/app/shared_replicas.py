"""SharedReplicas: the replicas of a model that several front ends share, as one of them has them.

The parent of the front ends starts, restarts and ends the cores. A front end connects to each, and sends requests to
those that have entered. A core that is started later enters in steps. All front ends see that it is loaded: what they
ask of all replicas from then on is asked of it, too. A front end makes it as the others are. Then all send it requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from typing_extensions import override

from quire.app.front_end import FrontEnd
from quire.app.front_end_notes import (
    CatchUp,
    CaughtUp,
    CoreEnded,
    CoreEntered,
    CoreLoaded,
    CoreSeat,
    CoresLeave,
    CoresRemoved,
    CoreStarted,
    Drained,
    EndCore,
    GiveUpScaling,
    OfCores,
    OtherEnded,
    Scale,
    Scaled,
)
from quire.app.front_end_notes import Scaling as ScalingNote
from quire.app.models import ModelSource
from quire.app.running_models import NewObserver, front_end_of
from quire.app.shared_model import ModelBeforeSharedCores, SiblingsOf, new_client
from quire.config.commands import Serve
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.errors import CommandRefused, DrainTimedOut, EngineDead
from quire.engine.client.records import CORE_EVENTS
from quire.engine.client.replicas.replica import Replica, end_stalled
from quire.engine.client.replicas.replica_set import ReplicaSet
from quire.engine.client.replicas.scaling import Scaling, check_scalable
from quire.engine.client.shared_channel import FrontEndChannel
from quire.multimodal.memory import MediaMemory
from quire.rendering.tokenizer import Tokenizer
from quire.serving.models import ServedModel, ServerState

_LOOK_EVERY = 0.02  # seconds between two looks whether requests have ended
_CHECK_SECONDS = 5.0  # between two looks whether replicas answer


@dataclass(slots=True, eq=False)
class _Seat:
    """A replica as this front end has it.

    Attributes:
        entered: its core may get requests, as the parent says.
        joining: waits until it is loaded, and may get requests.
        catching_up: makes it as the others are.
    """

    replica: Replica
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    joining: asyncio.Task[None] | None = None
    catching_up: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Let the core not join, which has ended."""
        for task in (self.joining, self.catching_up):
            if task is not None:
                task.cancel()


class SharedReplicas(ModelBeforeSharedCores, Scaling):
    """A model whose engine is a set of replicas."""

    def __init__(self, source: ModelSource, settings: Serve, front_end: FrontEnd) -> None:
        """Connect to the cores, which are loading the model; `loaded` waits for them."""
        assert front_end.dispatch is not None
        self._source = source
        self._settings = settings
        self._front_end = front_end
        self._dispatch = front_end.dispatch
        self._tokenizer = Tokenizer.load(source.folder)
        self._slots = front_end.slots(settings)
        self._set = ReplicaSet(
            self._slots, has_prefix_cache=settings.enable_prefix_caching, operations=self._dispatch.operations()
        )
        self._model: ServedModel | None = None
        self._new_observer: NewObserver | None = None
        self._siblings_of: SiblingsOf | None = None
        self._gave_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # a replica has entered
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining: asyncio.Task[None] | None = None
        self._is_scaling = False
        self._scaled: asyncio.Future[Scaled] | None = None
        self._seats: dict[int, _Seat] = {}
        for core in front_end.cores:
            self._add(core)
        if any(core.is_leaving for core in front_end.cores):
            self._drain([core.rank for core in front_end.cores if core.is_leaving])
        front_end.watch_core(self._handle)

    def _add(self, core: CoreSeat) -> None:
        """Connect to a core."""
        rank, number = core.rank, core.rank - self._settings.first_replica
        client = new_client(self._front_end, core.address, self._settings, self._tokenizer, self._slots, rank)
        load, new_prefixes = self._dispatch.load(number), partial(self._dispatch.prefixes, number)
        replica = Replica(rank, client, load, new_prefixes, entered=core.has_entered)
        replica.end = partial(self._end, rank)
        replica.is_leaving = core.is_leaving
        seat = self._seats[rank] = _Seat(replica)
        if core.has_entered:
            seat.entered.set()
        self._set.add(replica)
        if self._new_observer is not None:
            client.observers.add(self._new_observer(rank))
        if self._siblings_of is not None:
            client.siblings = self._siblings_of(rank)
        if core.death is None:
            seat.joining = asyncio.create_task(self._join(seat))
        else:
            client.fail(core.death)

    async def _join(self, seat: _Seat, channel: FrontEndChannel | None = None) -> None:
        """Wait until a core is loaded, tell the parent, and let the core get requests when the parent says so.

        `channel`: to a core in place of one that has died.
        """
        replica = seat.replica
        if channel is not None:
            await replica.client.reconnect(channel)
        try:
            self._set.describe(replica, await replica.client.ready())
        except EngineDead:  # the parent starts another one, or gives up
            return
        self._front_end.tell(CoreLoaded(replica.rank))
        await seat.entered.wait()
        replica.has_entered = True
        if not self._first.done():
            self._first.set_result(None)

    async def _catch_up(self, seat: _Seat) -> None:
        """Make a core as the others are; without success it is started again."""
        assert seat.replica.info is not None
        with suppress(EngineDead):
            await self._set.enter(seat.replica, seat.replica.info)
            self._front_end.tell(CaughtUp(seat.replica.rank))

    def _end(self, rank: int, reason: str) -> None:
        self._seats[rank].replica.client.fail(reason)
        self._front_end.tell(EndCore(rank, reason))

    @property
    @override
    def clients(self) -> Mapping[int, EngineClient]:
        return {rank: seat.replica.client for rank, seat in self._seats.items()}

    @override
    def use_siblings(self, siblings_of: SiblingsOf) -> None:
        self._siblings_of = siblings_of
        for rank, client in self.clients.items():
            client.siblings = siblings_of(rank)

    @override
    async def loaded(self, media_memory: MediaMemory | None = None) -> ServedModel:
        if self._front_end.generation == 1:
            await asyncio.gather(*(client.ready() for client in self.clients.values()))
        else:
            await self._first
        infos = [seat.replica.info for seat in self._seats.values() if seat.replica.info is not None]
        info = min(infos, key=lambda info: info.max_model_len)
        self._model = front_end_of(self._source, self._settings, self._tokenizer, self._set, info, self, media_memory)
        return self._model

    @override
    def observe(self, new_observer: NewObserver, number: int) -> None:
        self._new_observer = new_observer
        self._set.observers.add(new_observer(self._settings.first_replica), without=CORE_EVENTS)
        for rank, client in self.clients.items():
            client.observers.add(new_observer(rank))

    @override
    async def watch(self, state: ServerState, give_up: Callable[[str], None]) -> None:
        state.degraded.append(self._degradation)
        while not self._gave_up.done():
            await asyncio.wait([self._gave_up], timeout=_CHECK_SECONDS)
            end_stalled(self._set.replicas, state.stall_timeout)
        if not state.draining:
            give_up(self._gave_up.result())

    def _degradation(self) -> str | None:
        """Why not all replicas answer requests; None if all do."""
        replicas = self._set.replicas
        dead = [replica.client.dead for replica in replicas if replica.client.dead is not None]
        return f"Of {len(replicas)} replicas {len(dead)} do not run: {dead[0]}" if dead else None

    @override
    async def stop(self) -> None:
        """End the connections. The cores go on."""
        tasks = [*self._tasks, *([] if self._draining is None else [self._draining])]
        for seat in self._seats.values():
            seat.cancel()
        for task in tasks:
            task.cancel()
        if self._model is not None:
            await self._model.close()
        await asyncio.gather(*(client.close() for client in self.clients.values()))

    def _handle(self, note: OfCores) -> None:
        """Do what the parent says."""
        match note:
            case OtherEnded(identity=identity):
                for client in self.clients.values():
                    client.forget_front_end(identity)
            case CoreEnded(rank=rank, reason=reason, restarts=restarts):
                self._note_death(self._seats[rank], reason, restarts=restarts)
            case CoreStarted(rank=rank, address=address) if rank in self._seats:
                channel = FrontEndChannel(address, self._front_end.identity)
                self._seats[rank].joining = asyncio.create_task(self._join(self._seats[rank], channel))
            case CoreStarted(rank=rank, address=address):
                self._add(CoreSeat(rank, address, has_entered=False, is_leaving=False, death=None))
            case CatchUp(rank=rank):
                self._seats[rank].catching_up = asyncio.create_task(self._catch_up(self._seats[rank]))
            case CoreEntered(rank=rank):
                self._seats[rank].entered.set()
            case CoresLeave(ranks=ranks, is_leaving=is_leaving):
                self._set.set_leaving([self._seats[rank].replica for rank in ranks], is_leaving=is_leaving)
                if is_leaving:
                    self._drain(ranks)
                elif self._draining is not None:
                    self._draining.cancel()
            case CoresRemoved(ranks=ranks):
                for rank in ranks:
                    self._remove(rank)
            case ScalingNote(is_scaling=is_scaling):
                self._is_scaling = is_scaling
            case Scaled():
                if self._scaled is not None and not self._scaled.done():
                    self._scaled.set_result(note)

    def _note_death(self, seat: _Seat, reason: str, *, restarts: bool) -> None:
        client = seat.replica.client
        seat.cancel()
        seat.entered.clear()
        seat.replica.has_entered = False
        client.fail(reason)
        death = str(client.dead or reason)
        if restarts:
            client.announce_restart(f"The engine has stopped: {reason}")
        elif not self._gave_up.done():
            self._gave_up.set_result(death)

    def _drain(self, ranks: Sequence[int]) -> None:
        """Tell the parent when there are no requests in cores that leave."""
        clients = [self._seats[rank].replica.client for rank in ranks]

        async def drain() -> None:
            while any(client.open_streams for client in clients):  # noqa: ASYNC110 no cost for requests
                await asyncio.sleep(_LOOK_EVERY)
            self._front_end.tell(Drained())

        self._draining = asyncio.create_task(drain())

    def _remove(self, rank: int) -> None:
        seat = self._seats.pop(rank)
        seat.cancel()
        seat.replica.forget_prefixes()
        self._set.remove(seat.replica)
        self._keep(self._close(seat.replica.client))

    async def _close(self, client: EngineClient) -> None:
        await client.close()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that nobody waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    @override
    def is_scaling(self) -> bool:
        return self._is_scaling

    @property
    @override
    def replicas(self) -> Sequence[Replica]:
        return self._set.replicas

    @override
    async def scale(self, size: int, drain_timeout: float) -> None:
        is_scaling = self._scaled is not None or self._is_scaling
        check_scalable(has_part_of_replicas=self._settings.has_part_of_replicas, is_scaling=is_scaling)
        self._scaled = asyncio.get_running_loop().create_future()
        try:
            self._front_end.tell(Scale(size, drain_timeout))
            answer = await self._scaled
        except asyncio.CancelledError:
            self._front_end.tell(GiveUpScaling())
            raise
        finally:
            self._scaled = None
        if answer.timed_out:
            left = sum(replica.load.requests for replica in self._set.replicas[size:])
            raise DrainTimedOut(
                f"{left} requests of the replicas to be removed have not ended within {drain_timeout:g} seconds; "
                f"there are {len(self._set.replicas)} replicas as before."
            )
        if answer.error is not None:
            raise CommandRefused(answer.error)
