"""AbsentEngine: stands in for an engine in a server that renders prompts and runs no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from typing import NoReturn

from typing_extensions import override

from quire.engine.client.batch import OnResult, PooledBatch
from quire.engine.client.commands import Commands, CommandSender
from quire.engine.client.deadline import Deadline
from quire.engine.client.engine import NO_DEADLINE
from quire.engine.client.errors import EngineDead, EngineError
from quire.engine.client.model_info import KVEventSource
from quire.engine.client.protocol import (
    MediaItem,
    MemoryTag,
    RunCommand,
    Sleep,
    SleepLevel,
    StepStats,
    TokenArray,
    Wake,
)
from quire.engine.client.records import Observers
from quire.engine.client.siblings import NoSiblings, Siblings
from quire.engine.client.sleep import SleepControl, Sleeping
from quire.engine.client.slots import Slots, SlottedEngine
from quire.engine.client.stream import Delta, GenerateRequest, Pooled, PoolRequest


class AbsentEngine(SlottedEngine):
    """An engine that runs no requests. It has the slots of the engine that prompts are rendered for.

    Requests, and what operators ask of engines, raise EngineDead.
    """

    def __init__(self, slots: Slots) -> None:
        """`slots`: those of the engine that prompts are rendered for."""
        self.observers = Observers()
        self.siblings: Siblings = NoSiblings()
        self.sleeping: Sleeping = SleepControl(self)
        self.commands: Commands = CommandSender(self)
        self._slots = slots

    @property
    @override
    def open_streams(self) -> int:
        return 0

    @property
    def is_idle(self) -> bool:
        """See `SleepingClient`."""
        return True

    @property
    @override
    def kv_event_sources(self) -> dict[int, KVEventSource]:
        return {}

    @property
    @override
    def stats(self) -> StepStats:
        return StepStats()

    @property
    @override
    def dead(self) -> EngineDead | None:
        return None

    @override
    def unresponsive_seconds(self) -> float:
        return 0.0

    @override
    async def wait_until_dead(self) -> NoReturn:
        while True:
            await asyncio.Event().wait()

    @override
    def fail(self, reason: str) -> None:
        pass

    def end_all(self, error: EngineError) -> None:
        """See `SleepingClient`: there are no requests."""

    def on_sleep(self, asleep: frozenset[MemoryTag], level: SleepLevel) -> None:
        """See `SleepingClient`: it never sleeps."""

    def send_control(self, message: Sleep | Wake | RunCommand) -> None:
        """See `SleepingClient`."""
        raise _absent()

    @override
    def slots(self, count: int, tenant: str = "") -> AbstractContextManager[None]:
        return self._slots.held(count, tenant, self.stats, self.observers)

    @override
    def generate(
        self, request: GenerateRequest, ended: Callable[[], None] | None = None
    ) -> AsyncGenerator[Delta, None]:
        raise _absent()

    @override
    def extend(
        self, request_id: str, tokens: TokenArray, *, last: bool = False, items: tuple[MediaItem, ...] = ()
    ) -> None:
        raise _absent()

    @override
    async def pool(self, request: PoolRequest) -> Pooled:
        raise _absent()

    @override
    def pool_batch(
        self, *, deadline: Deadline = NO_DEADLINE, on_result: OnResult | None = None, tenant: str = ""
    ) -> AbstractContextManager[PooledBatch]:
        raise _absent()


def _absent() -> EngineDead:
    return EngineDead("This server renders prompts, and runs no model.")
