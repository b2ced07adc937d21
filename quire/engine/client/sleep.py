"""Client side of an engine's sleep: keeps requests away from an engine without memory."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from quire.engine.client.errors import EngineAsleep, EngineDead, EngineError, SleepFailed
from quire.engine.client.protocol import EngineState, MemoryTag, Sleep, SleepLevel, SleepState, Wake
from quire.engine.client.siblings import NoSiblings, Notice, Siblings

_LOOK_EVERY = 0.02  # seconds between two looks whether requests have ended, which thus have no cost when they end
_ABORTED = "The request was aborted: POST /sleep has put the model to sleep; POST /wake_up wakes it."
_ASLEEP = "The model is asleep; POST /wake_up wakes it."


class SleepingClient(Protocol):
    """What `SleepControl` needs of the client of an engine.

    Attributes:
        siblings: the clients of other front ends that share the engine.
    """

    siblings: Siblings = NoSiblings()

    @property
    def is_idle(self) -> bool:
        """Whether no sequence runs, waits or is being prepared."""

    @property
    def dead(self) -> EngineDead | None:
        """The error that ended the engine; None while it runs."""

    def end_all(self, error: EngineError) -> None:
        """Abort all requests with an error."""

    def on_sleep(self, asleep: frozenset[MemoryTag], level: SleepLevel) -> None:
        """Take note of what has no memory now; `level`: of the last sleep."""

    def send_control(self, message: Sleep | Wake) -> None:
        """Send a message; raises EngineDead if the engine has stopped."""


class Sleeping(Protocol):
    """Put an engine to sleep and wake it."""

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        """What has no memory."""

    async def sleep(self, level: SleepLevel, *, wait: bool = False) -> None:
        """Free the memory of the engine. See `Sleep` for the levels; of two, the deeper one counts.

        Args:
            level: the level.
            wait: let requests that have begun end first; else they are aborted. New ones are refused at once. To cancel
                this wait leaves the engine awake; once the engine has been told, it falls asleep all the same.

        Raises:
            SleepFailed: the engine cannot sleep.
            EngineDead: the engine has stopped.
        """

    async def wake_up(self, tags: Iterable[MemoryTag]) -> None:
        """Restore what sleeps of these tags; nothing happens if none of them does.

        Raises:
            SleepFailed: there is not enough memory, or the checkpoint cannot be read; the engine still sleeps.
            EngineDead: the engine has stopped.
        """


class SleepControl:
    """Put the core of a client to sleep and wake it, one after the other: `Sleeping` of one core.

    Attributes:
        asleep: what has no memory.
        refusal: the error of requests; None while the engine is awake.
        refusal_of_new: the error of requests that begin now; those that have begun may still end.
    """

    def __init__(self, client: SleepingClient) -> None:
        self._client = client
        self._lock = asyncio.Lock()
        self._change: asyncio.Future[None] | None = None  # the loop alone would not keep it alive
        self._reply: asyncio.Future[SleepState] | None = None
        self._level: SleepLevel = 1  # of the last sleep
        self.asleep: frozenset[MemoryTag] = frozenset()
        self.refusal: EngineAsleep | None = None
        self.refusal_of_new: EngineAsleep | None = None

    async def sleep(self, level: SleepLevel, *, wait: bool = False) -> None:
        """See `Sleeping`."""
        await self._lock.acquire()
        try:
            self.refusal_of_new = EngineAsleep(_ASLEEP)
            await self._client.siblings.tell("falls_asleep")
            while wait and not self._client.is_idle:
                if (dead := self._client.dead) is not None:
                    raise dead
                await asyncio.sleep(_LOOK_EVERY)
        except BaseException:
            await self._complete(self._stay_awake())
            raise
        await self._complete(self._fall_asleep(level))

    async def wake_up(self, tags: Iterable[MemoryTag]) -> None:
        """See `Sleeping`."""
        await self._lock.acquire()
        await self._complete(self._wake(tags))

    def heed(self, notice: Notice) -> None:
        """Do what another front end says, which puts the engine to sleep."""
        match notice:
            case "falls_asleep":
                self.refusal_of_new = EngineAsleep(_ASLEEP)
            case "asleep":
                self.refusal = self.refusal_of_new = EngineAsleep(_ASLEEP)
                self._client.end_all(EngineAsleep(_ABORTED))
            case _:
                self._settle_unless_changing()

    def learned(self, state: EngineState) -> None:
        """Another front end has put the engine to sleep, or has woken it."""
        self.asleep, self._level = state.asleep, state.level
        self._client.on_sleep(self.asleep, self._level)
        self._settle_unless_changing()

    def received(self, state: SleepState) -> None:
        """The core has answered."""
        self.asleep = state.asleep
        self._client.on_sleep(self.asleep, self._level)
        self._settle()
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(state)

    def ended(self, error: EngineDead) -> None:
        """The core has ended; another one is awake."""
        self.asleep = frozenset()
        self._client.on_sleep(self.asleep, self._level)
        self._settle()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)

    async def _complete(self, change: Coroutine[Any, Any, None]) -> None:
        """Run the part of a change that talks to the engine, then release the lock, which the caller has acquired.

        A task of its own does so. If the caller is cancelled, the state would otherwise not be that of the engine, and
        the answer could be taken for that to the next message.
        """
        self._change = asyncio.ensure_future(change)
        self._change.add_done_callback(lambda _: self._lock.release())
        await asyncio.shield(self._change)

    async def _fall_asleep(self, level: SleepLevel) -> None:
        try:
            self.refusal = self.refusal_of_new
            self._client.end_all(EngineAsleep(_ABORTED))
            await self._client.siblings.tell("asleep")
            self._level = max(level, self._level) if self.asleep else level
            await self._ask(Sleep(level))
        finally:
            await self._stay_awake()

    async def _stay_awake(self) -> None:
        """Let requests begin again, unless the engine sleeps."""
        self._settle()
        await self._client.siblings.tell("stays_awake")

    async def _wake(self, tags: Iterable[MemoryTag]) -> None:
        if waking := self.asleep.intersection(tags):
            await self._ask(Wake(waking))

    async def _ask(self, message: Sleep | Wake) -> None:
        self._reply = asyncio.get_running_loop().create_future()
        try:
            self._client.send_control(message)
            state = await self._reply
        finally:
            self._reply = None
        if state.error is not None:
            raise SleepFailed(state.error)

    def _settle(self) -> None:
        self.refusal = self.refusal_of_new = EngineAsleep(_ASLEEP) if self.asleep else None

    def _settle_unless_changing(self) -> None:
        if not self._lock.locked():  # else this happens at the end of what is being done here
            self._settle()
