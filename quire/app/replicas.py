"""Replicas: the cores of a model that are its replicas. Each has its part of the machine, and is started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from quire.app.cores import CoreFactory, RunningCore, with_context
from quire.app.placement import memory_of_replicas, replica_places
from quire.app.running_models import NewObserver
from quire.app.supervision import DeathPolicy, supervise
from quire.engine.client.engine import Engine
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.errors import CommandRefused, DrainTimedOut, EngineDead
from quire.engine.client.launch import ProcessPlace
from quire.engine.client.model_info import ModelInfo
from quire.engine.client.records import CORE_EVENTS
from quire.engine.client.replicas.replica import Replica, end_stalled
from quire.engine.client.replicas.replica_set import ReplicaSet
from quire.engine.client.replicas.scaling import Scaling, check_scalable
from quire.engine.execution.devices.select import uses_gpu, visible_gpus
from quire.engine.execution.memory import MemoryShare
from quire.engine.models.errors import UnavailableDevice
from quire.serving.models import ServerState

logger = logging.getLogger("quire")
_LOOK_EVERY = 0.02  # seconds between two looks whether requests have ended
_CHECK_SECONDS = 5.0  # between two looks whether replicas answer
_PAUSE = 60.0  # seconds until a replica that could not be started is tried again, while others run


@dataclass(frozen=True, slots=True, eq=False)
class RunningReplica:
    """A replica and its core."""

    core: RunningCore
    replica: Replica
    replicas: ReplicaSet

    @property
    def client(self) -> EngineClient:
        """The client of the core."""
        return self.core.client

    async def restart(self) -> None:
        """Start another core, and let it get requests; raises EngineDead if that has failed."""
        await self.replicas.enter(self.replica, await self.core.restart())


class Replicas(Scaling):
    """The cores of a model's replicas.

    Attributes:
        engine: the engine that they are together.
    """

    def __init__(self, factory: CoreFactory, weight_bytes: int) -> None:
        """Start loading all of them. `weight_bytes`: of the model.

        Raises:
            UnavailableDevice: there are not enough GPUs.
        """
        self._factory = factory
        self._settings = settings = factory.settings
        self._weight_bytes = weight_bytes
        self._gpus = visible_gpus() if uses_gpu(settings.device) else None
        self._info: ModelInfo | None = None
        self._is_scaling = False
        self._new_observer: NewObserver | None = None
        self._supervise: Callable[[RunningReplica], None] | None = None
        self._tasks: dict[RunningReplica, asyncio.Task[None]] = {}
        self._set = ReplicaSet(factory.slots, has_prefix_cache=settings.enable_prefix_caching)
        self.engine: Engine = self._set
        places = replica_places(settings, settings.replicas, self._gpus)
        share = self._share(settings.replicas)
        self._running = [self._start(rank, place, share) for rank, place in enumerate(places, settings.first_replica)]

    def _share(self, added: int) -> MemoryShare | None:
        """What each of so many cores that are started now may take of the host's memory."""
        if self._gpus is not None:
            return None
        reserved = 0 if self._info is None else self._info.cache_bytes * len(self._running)
        return memory_of_replicas(added, reserved, self._weight_bytes)

    def _start(self, rank: int, place: ProcessPlace, share: MemoryShare | None) -> RunningReplica:
        factory = self._factory
        if self._info is not None:
            factory = replace(factory, config=with_context(factory.config, self._info))
        core = factory.core(rank, place, share, sharers=self._settings.replicas)
        replica = Replica(rank, core.client)
        self._set.add(replica)
        return RunningReplica(core, replica, self._set)

    async def ready(self) -> ModelInfo:
        """Wait until all are loaded, and let them get requests.

        Returns:
            Facts about the model, with the shortest context of all.

        Raises:
            EngineDead: one could not be loaded.
        """
        infos = await asyncio.gather(*(running.client.ready() for running in self._running))
        self._info = min(infos, key=lambda info: info.max_model_len)
        for running, info in zip(self._running, infos, strict=True):
            await self._enter(running, info)
        return self._info

    async def _enter(self, running: RunningReplica, info: ModelInfo) -> None:
        assert self._info is not None
        running.core.keep_context(self._info)
        await self._set.enter(running.replica, info)

    def observe(self, new_observer: NewObserver, number: int) -> None:
        """Have each core observed, also those that are added later; what the front end does counts as of the first."""
        self._new_observer = new_observer
        self._set.observers.add(new_observer(self._settings.first_replica), without=CORE_EVENTS)
        for running in self._running:
            running.client.observers.add(new_observer(running.replica.rank))

    async def watch(self, state: ServerState, give_up: Callable[[str], None]) -> None:
        """Start replicas again that die. Call `give_up` with the reason when none runs and none can be started."""

        def supervise_one(running: RunningReplica) -> None:
            self._tasks[running] = asyncio.create_task(self._keep(running, state, give_up))

        self._supervise = supervise_one
        state.degraded.append(self._degradation)
        for running in self._running:
            supervise_one(running)
        try:
            while True:
                await asyncio.sleep(_CHECK_SECONDS)
                end_stalled(self._set.replicas, state.stall_timeout)
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _keep(self, running: RunningReplica, state: ServerState, give_up: Callable[[str], None]) -> None:
        """Start a replica again whenever it has died, as long as another one runs."""

        def policy() -> DeathPolicy:
            return self._settings.on_engine_death if self._set.dead is not None else "restart"

        while not state.draining:
            reasons: list[str] = []
            await supervise(running, policy, state, reasons.append)
            if reasons and self._set.dead is not None:
                give_up(reasons[0])
                return
            if reasons:
                rank = running.replica.rank
                logger.error("replica %d cannot be started; next attempt in %.0f s: %s", rank, _PAUSE, reasons[0])
                await asyncio.sleep(_PAUSE)

    def _degradation(self) -> str | None:
        """Why not all replicas answer requests; None if all do."""
        dead = [running for running in self._running if running.client.dead is not None]
        if not dead:
            return None
        return f"Of {len(self._running)} replicas {len(dead)} do not run: {dead[0].client.dead}"

    def set_memory_share(self, share: MemoryShare) -> None:
        """Set what cores that are started later may take."""
        for running in self._running:
            running.core.set_memory_share(share)

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
        check_scalable(has_part_of_replicas=self._settings.has_part_of_replicas, is_scaling=self._is_scaling)
        self._is_scaling = True
        try:
            if size > len(self._running):
                await self._grow(size)
            elif size < len(self._running):
                await self._shrink(size, drain_timeout)
        finally:
            self._is_scaling = False

    async def _grow(self, size: int) -> None:
        first = len(self._running)
        try:
            places = replica_places(self._settings, size, self._gpus)[first:]
        except UnavailableDevice as error:
            raise CommandRefused(f"{error}.") from error
        share = self._share(len(places))
        added = [self._start(rank, place, share) for rank, place in enumerate(places, first)]
        try:
            # None gets requests, which would end with it, before all are loaded.
            infos = [await running.client.ready() for running in added]
            for running, info in zip(added, infos, strict=True):
                if self._new_observer is not None:
                    running.client.observers.add(self._new_observer(running.replica.rank))
                await self._enter(running, info)
        except BaseException as error:
            await asyncio.gather(*map(self._remove, added))
            if isinstance(error, EngineDead):
                raise CommandRefused(f"A replica could not be started: {error}") from error
            raise
        self._running += added
        if self._supervise is not None:
            for running in added:
                self._supervise(running)
        logger.info("there are %d replicas now", size)

    async def _shrink(self, size: int, drain_timeout: float) -> None:
        leaving = self._running[size:]
        replicas = [running.replica for running in leaving]
        self._set.set_leaving(replicas, is_leaving=True)
        try:
            async with asyncio.timeout(drain_timeout):
                while any(running.client.open_streams for running in leaving):  # noqa: ASYNC110 no cost for requests
                    await asyncio.sleep(_LOOK_EVERY)
        except BaseException as error:
            self._set.set_leaving(replicas, is_leaving=False)
            if isinstance(error, TimeoutError):
                left = sum(running.client.open_streams for running in leaving)
                raise DrainTimedOut(
                    f"{left} requests of the replicas to be removed have not ended within {drain_timeout:g} seconds; "
                    f"there are {len(self._running)} replicas as before."
                ) from error
            raise
        del self._running[size:]
        await asyncio.gather(*map(self._remove, leaving))
        logger.info("there are %d replicas now", size)

    async def _remove(self, running: RunningReplica) -> None:
        """End a replica, which has no requests."""
        task = self._tasks.pop(running, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._set.remove(running.replica)
        await running.core.stop()

    async def stop(self) -> None:
        """Stop all cores, loaded or not, and wait until they have ended, but not for long."""
        await asyncio.gather(*(running.core.stop() for running in self._running))
