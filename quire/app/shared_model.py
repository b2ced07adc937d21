"""SharedModel: a model whose engine several front ends share, as one of them has it (--api-server-count)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol, runtime_checkable

from quire.app.front_end import FrontEnd
from quire.app.front_end_notes import CoreEnded, CoreStarted, OfCores, OtherEnded
from quire.app.models import ModelSource
from quire.app.running_models import NewObserver, RunningModel, front_end_of
from quire.config.commands import Serve
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.errors import EngineDead
from quire.engine.client.request_log import RequestLog
from quire.engine.client.shared_channel import FrontEndChannel
from quire.engine.client.siblings import Siblings
from quire.engine.client.slots import Slots
from quire.multimodal.memory import MediaMemory
from quire.rendering.tokenizer import Tokenizer
from quire.serving.models import ServedModel, ServerState

SiblingsOf = Callable[[int], Siblings]  # the clients of other front ends, by the rank of their core


@runtime_checkable
class ModelBeforeSharedCores(RunningModel, Protocol):
    """A model whose engine several front ends share; another process runs it."""

    @property
    def clients(self) -> Mapping[int, EngineClient]:
        """The clients of its cores, by their ranks."""

    def use_siblings(self, siblings_of: SiblingsOf) -> None:
        """Let the clients of its cores, also of those that come later, know those of other front ends."""


def new_client(
    front_end: FrontEnd, address: str, settings: Serve, tokenizer: Tokenizer, slots: Slots, rank: int
) -> EngineClient:
    """Return the client of a core, which may still be loading."""
    client = EngineClient(FrontEndChannel(address, front_end.identity), tokenizer.backend, slots, rank)
    if settings.enable_log_requests:
        client.request_log = RequestLog(
            tokenizer.backend, settings.max_log_len, has_outputs=settings.enable_log_outputs
        )
    return client


class SharedModel(ModelBeforeSharedCores):
    """A model whose engine has one core."""

    def __init__(self, source: ModelSource, settings: Serve, front_end: FrontEnd) -> None:
        """Connect to the engine, which is loading the model; `loaded` waits for it."""
        self._source = source
        self._settings = settings
        self._front_end = front_end
        self._tokenizer = Tokenizer.load(source.folder)
        self._rank = settings.first_replica if settings.has_part_of_replicas else 0
        (core,) = front_end.cores
        slots = front_end.slots(settings)
        self.client = new_client(front_end, core.address, settings, self._tokenizer, slots, settings.first_replica)
        self._model: ServedModel | None = None
        self._gave_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._restarting: asyncio.Task[None] | None = None
        front_end.watch_core(self._handle)

    @property
    def clients(self) -> Mapping[int, EngineClient]:
        """See `ModelBeforeSharedCores`."""
        return {self._settings.first_replica: self.client}

    def use_siblings(self, siblings_of: SiblingsOf) -> None:
        """See `ModelBeforeSharedCores`."""
        self.client.siblings = siblings_of(self._settings.first_replica)

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

    def _handle(self, note: OfCores) -> None:
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
