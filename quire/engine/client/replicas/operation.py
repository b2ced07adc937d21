"""What an operator asks of a set of replicas: each of them does it, and one that enters later catches up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from typing_extensions import override

from quire.engine.client.commands import BegunPause, Commands, PauseMode
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.errors import CommandRefused, EngineDead, EngineError, RequestRefused
from quire.engine.client.protocol import EngineState, MemoryTag, SleepLevel
from quire.engine.client.replicas.replica import Replica
from quire.engine.client.sleep import Sleeping

_ALL: frozenset[MemoryTag] = frozenset(("weights", "kv_cache"))
_LOOK_EVERY = 0.02  # seconds between two looks whether operations have ended
Result = TypeVar("Result")


class LiveReplicas(Protocol):
    """What the operation of a set needs of it."""

    def live(self) -> Sequence[Replica]:
        """The replicas whose cores run; raises EngineDead if there is none."""


async def on_each(
    replicas: Sequence[Replica], act: Callable[[EngineClient], Coroutine[Any, Any, Result]]
) -> list[Result]:
    """Do something with all replicas at the same time, and return the results.

    One that dies meanwhile is left out, unless all do: it catches up when it has been started again.

    Raises:
        EngineError: one has refused; the others have ended, too.
        EngineDead: all have died.
    """
    ended: list[Result | BaseException] = await asyncio.gather(
        *(act(replica.client) for replica in replicas), return_exceptions=True
    )
    errors = [result for result in ended if isinstance(result, BaseException)]
    refusals = [error for error in errors if not isinstance(error, EngineDead)]
    if refusals or len(errors) == len(ended):
        raise (refusals or errors)[0]
    return [result for result in ended if not isinstance(result, BaseException)]


class Operations:
    """The operations that run on all replicas of a set. A replica that enters waits until they have ended."""

    def __init__(self) -> None:
        self.count_here = 0

    @property
    def count(self) -> int:
        """How many run, in all front ends."""
        return self.count_here

    def add(self, count: int) -> None:
        """Count operations of this front end; or fewer than before."""
        self.count_here += count

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which an operation runs."""
        self.add(1)
        try:
            yield
        finally:
            self.add(-1)

    async def end(self) -> None:
        """Wait until no operation runs."""
        while self.count:  # noqa: ASYNC110 other processes are not heard
            await asyncio.sleep(_LOOK_EVERY)


class ReplicaSleeping(Sleeping):
    """Put the replicas of a set to sleep and wake them."""

    def __init__(self, replicas: LiveReplicas, operations: Operations) -> None:
        self._replicas = replicas
        self._operations = operations
        self._level: SleepLevel = 1  # of the last sleep
        self._asleep: frozenset[MemoryTag] = frozenset()

    @property
    @override
    def asleep(self) -> frozenset[MemoryTag]:
        return self._asleep

    @override
    async def sleep(self, level: SleepLevel, *, wait: bool = False) -> None:
        with self._operations.running():
            await on_each(self._replicas.live(), lambda client: client.sleeping.sleep(level, wait=wait))
            self._level = max(level, self._level) if self._asleep else level
            self._asleep = _ALL

    @override
    async def wake_up(self, tags: Iterable[MemoryTag]) -> None:
        chosen = frozenset(tags)
        with self._operations.running():
            await on_each(self._replicas.live(), lambda client: client.sleeping.wake_up(chosen))
            self._asleep -= chosen

    def learned(self, state: EngineState) -> None:
        """Another front end has put the replicas to sleep, or has woken them."""
        self._asleep, self._level = state.asleep, state.level

    async def catch_up(self, client: EngineClient) -> None:
        """Put the client of a new core to sleep if the others sleep."""
        if self._asleep:
            await client.sleeping.sleep(self._level)
            await client.sleeping.wake_up(_ALL - self._asleep)


class ReplicaCommands(Commands):
    """Do what an operator asks for with all replicas of a set."""

    def __init__(self, replicas: LiveReplicas, operations: Operations) -> None:
        self._replicas = replicas
        self._operations = operations
        self._stays_paused = False  # until `resume`
        self._begun: dict[BegunPause, list[BegunPause]] = {}  # those of the replicas, by that of the set
        self._weights: Path | None = None  # the folder of those that have replaced the first ones

    @property
    @override
    def is_paused(self) -> bool:
        return self._stays_paused or bool(self._begun)

    @override
    async def pause(self, mode: PauseMode) -> BegunPause:
        pauses: list[BegunPause] = []

        async def pause(client: EngineClient) -> None:
            pauses.append(await client.commands.pause(mode))

        with self._operations.running():
            try:
                await on_each(self._replicas.live(), pause)
            except (asyncio.CancelledError, EngineError):
                for begun in pauses:
                    begun.give_up()
                raise
            begun_by_all = BegunPause(self)
            self._begun[begun_by_all] = pauses
            return begun_by_all

    def keep(self, begun: BegunPause) -> None:
        """See `BegunPause`."""
        if begun in self._begun:
            self._stays_paused = True
            for pause in self._begun.pop(begun):
                pause.keep()

    def give_up(self, begun: BegunPause) -> None:
        """See `BegunPause`."""
        for pause in self._begun.pop(begun, ()):
            pause.give_up()

    @override
    async def resume(self) -> None:
        self._stays_paused = False
        self._begun.clear()
        await on_each(self._replicas.live(), lambda client: client.commands.resume())

    @override
    async def reset_prefix_cache(self, *, preempt: bool = False, external: bool = False) -> None:
        replicas = self._replicas.live()
        await on_each(replicas, lambda client: client.commands.reset_prefix_cache(preempt=preempt, external=external))
        for replica in replicas:
            replica.forget_prefixes()

    @override
    async def reset_encoder_cache(self) -> None:
        await on_each(self._replicas.live(), lambda client: client.commands.reset_encoder_cache())

    @override
    async def update_weights(self, folder: Path, mode: PauseMode) -> None:
        replicas = self._replicas.live()
        refusals: dict[Replica, EngineError] = {}

        async def update(replica: Replica) -> None:
            try:
                await replica.client.commands.update_weights(folder, mode)
            except (CommandRefused, RequestRefused) as error:
                refusals[replica] = error

        with self._operations.running():
            await asyncio.gather(*map(update, replicas))
            if len(refusals) == len(replicas):
                raise next(iter(refusals.values()))
            self._weights = folder
        for replica, error in refusals.items():  # it is started again with the weights of the others
            replica.end(f"its weights were not replaced as those of other replicas were: {error}")
        for replica in replicas:
            replica.forget_prefixes()

    @override
    async def start_profile(self) -> None:
        await on_each(self._replicas.live(), lambda client: client.commands.start_profile())

    @override
    async def stop_profile(self) -> None:
        await on_each(self._replicas.live(), lambda client: client.commands.stop_profile())

    def learned(self, state: EngineState) -> None:
        """Another front end has paused the replicas, let them go on, or replaced their weights."""
        self._stays_paused = state.is_paused
        if not state.is_paused:
            self._begun.clear()
        if state.weights is not None:
            self._weights = Path(state.weights)

    async def catch_up(self, client: EngineClient) -> None:
        """Give a new core the weights that the others have, and pause it if they are paused."""
        if self._weights is not None:
            await client.commands.update_weights(self._weights, "abort")
        if self.is_paused:
            begun = await client.commands.pause("keep")
            if self._stays_paused:
                begun.keep()
            for pauses in self._begun.values():
                pauses.append(begun)
