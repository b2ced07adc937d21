"""RunningCore: the core of an engine and its client, which outlives it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from quire.app.core_process import serve_core_in_process
from quire.app.running_models import NewObserver, StepTraces
from quire.app.supervision import supervise
from quire.config.commands import Serve
from quire.config.options import LogOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.client.engine import Engine
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.launch import CoreEntry, CoreHandle, PreparedProcess, ProcessCore, ProcessPlace, ThreadCore
from quire.engine.client.model_info import ModelInfo
from quire.engine.client.request_log import RequestLog
from quire.engine.client.slots import Slots
from quire.engine.client.transport import ClientChannel
from quire.engine.execution.memory import MemoryShare
from quire.rendering.tokenizer import Tokenizer
from quire.serving.models import ServerState

_STOP_TIMEOUT = 2.0  # seconds; part of the time that a shutdown may take after the drain


@dataclass(frozen=True, slots=True)
class CoreFactory:
    """What the cores of a model have in common.

    Attributes:
        traces: how their steps are traced; None: they are not.
        slots: of their sequences.
        prepared: the process of the only core; None: it is started when the core is.
    """

    settings: Serve
    config: CoreConfig
    tokenizer: Tokenizer
    slots: Slots
    traces: StepTraces | None = None
    prepared: PreparedProcess | None = None

    def core(self, rank: int, place: ProcessPlace | None, share: MemoryShare | None, sharers: int = 1) -> RunningCore:
        """Start a core.

        Args:
            rank: its number among the replicas.
            place: where its process runs; None: the settings say whether it has one.
            share: what it may take of the memory, if others share it.
            sharers: see `CoreConfig`.
        """
        return RunningCore(self, rank, place, replace(self.config, memory_share=share, replica=rank, sharers=sharers))


def with_context(config: CoreConfig, info: ModelInfo) -> CoreConfig:
    """The configuration of a core that must have the context of another one, however much memory is free."""
    return with_max_model_len(config, info.max_model_len) if info.num_blocks else config


def with_max_model_len(config: CoreConfig, length: int) -> CoreConfig:
    """The configuration of a core with this context."""
    return replace(config, model=config.model.model_copy(update={"max_model_len": length}))


class RunningCore:
    """The core of an engine, and its client."""

    def __init__(self, factory: CoreFactory, rank: int, place: ProcessPlace | None, config: CoreConfig) -> None:
        """Start loading the model; `client.ready()` waits for it."""
        self._settings = settings = factory.settings
        self._traces = factory.traces
        self._rank = rank
        self._place = place or (ProcessPlace() if settings.engine_process else None)
        self._config = config
        self._handle = self._new_handle(factory.prepared)
        self.client = EngineClient(ClientChannel(self._handle.address), factory.tokenizer.backend, factory.slots, rank)
        if settings.enable_log_requests:
            self.client.request_log = RequestLog(
                factory.tokenizer.backend, settings.max_log_len, has_outputs=settings.enable_log_outputs
            )
        self._start()

    def set_memory_share(self, share: MemoryShare) -> None:
        """Set what a core that is started later may take, when all other engines are built."""
        self._config = replace(self._config, memory_share=share)

    def keep_context(self, info: ModelInfo) -> None:
        """Let a core that is started later have the context that requests are checked for."""
        self._config = with_context(self._config, info)

    async def restart(self) -> ModelInfo:
        """Start another core in place of one that has died, and wait until it is loaded.

        Raises:
            EngineDead: it could not be loaded.
        """
        await self._handle.join(_STOP_TIMEOUT)
        if self._place is None:
            gc.unfreeze()
            gc.collect()  # its model and KV cache, before the next ones need their memory
        self._handle = self._new_handle()
        await self.client.reconnect(ClientChannel(self._handle.address))
        self._start()
        return await self.client.ready()

    async def stop(self) -> None:
        """Stop the core, loaded or not, and wait until it has ended, but not for long."""
        connected = await self.client.close()
        await self._handle.join(_STOP_TIMEOUT if connected else 0.0)

    def _new_handle(self, prepared: PreparedProcess | None = None) -> CoreHandle:
        return ThreadCore() if self._place is None else ProcessCore(self._place, f"quire-engine-{self._rank}", prepared)

    def _start(self) -> None:
        traces = self._traces
        if self._place is not None:
            logs, exported = LogOptions.of(self._settings), None if traces is None else traces.settings
            body: CoreEntry = partial(serve_core_in_process, self._config, logs, exported)
        else:
            from quire.engine.build.engine import serve_core  # noqa: PLC0415 imports torch

            body = partial(serve_core, self._config, observer=None if traces is None else traces.new_observer())
        self._handle.start(body, self.client.fail)


class SingleCore:
    """The only core of a model.

    Attributes:
        engine: the engine that it is.
    """

    def __init__(self, factory: CoreFactory, share: MemoryShare | None) -> None:
        """Start loading the model. `share`: what it may take of the memory, if other models share it."""
        self._settings = factory.settings
        self._core = factory.core(factory.settings.first_replica, None, share)
        self.engine: Engine = self._core.client

    async def ready(self) -> ModelInfo:
        """Wait until the model is loaded; raises EngineDead if that has failed."""
        return await self._core.client.ready()

    def observe(self, new_observer: NewObserver, number: int) -> None:
        """Have the core observed; see `RunningModel.observe`. The model is loaded."""
        settings = self._settings
        self.engine.observers.add(new_observer(settings.first_replica if settings.has_part_of_replicas else number))

    async def watch(self, state: ServerState, give_up: Callable[[str], None]) -> None:
        """Start the core again when it has died, if the settings say so; else call `give_up` with the reason."""
        await supervise(self._core, lambda: self._settings.on_engine_death, state, give_up)

    def set_memory_share(self, share: MemoryShare) -> None:
        """See `RunningCore`."""
        self._core.set_memory_share(share)

    async def restart(self) -> None:
        """See `RunningCore`."""
        await self._core.restart()

    async def stop(self) -> None:
        """See `RunningCore`."""
        await self._core.stop()
