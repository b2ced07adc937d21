"""Commands of an operator to an engine: caches, pauses, new weights, profiles."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

from typing_extensions import override

from quire.engine.client.errors import CommandRefused, EngineDead, EngineError, RequestAborted, RequestRefused
from quire.engine.client.protocol import (
    Command,
    CommandDone,
    Pause,
    ResetCaches,
    Resume,
    RunCommand,
    StartProfile,
    StopProfile,
    UpdateWeights,
)
from quire.engine.client.siblings import NoSiblings, Notice, Siblings

_ABORTED_FOR: dict[Notice, str] = {
    "paused": "The request was aborted: POST /pause has paused the model.",
    "updated": "The request was aborted: POST /update_weights replaces weights.",
}
PauseMode = Literal["abort", "wait", "keep"]  # what happens to requests that have begun, by vLLM's names


class CommandedClient(Protocol):
    """What `CommandSender` needs of the client of an engine.

    Attributes:
        siblings: the clients of other front ends that share the engine.
    """

    siblings: Siblings = NoSiblings()

    def end_all(self, error: EngineError) -> None:
        """Abort all requests with an error."""

    def send_control(self, message: RunCommand) -> None:
        """Send a message; raises EngineDead if the engine has stopped."""


class Commands(Protocol):
    """What an operator can ask of an engine. All methods raise EngineDead if the engine has stopped."""

    @property
    def is_paused(self) -> bool:
        """Whether no step is run, or none will be once requests that have begun have ended."""

    async def pause(self, mode: PauseMode) -> BegunPause:
        """Run no more steps until `resume`. New requests wait, as many as the queue takes.

        Args:
            mode: requests that have begun are aborted, or end first, or wait and go on later. To cancel a wait for
                their end leaves the engine as it was, or as others want it.

        Returns:
            The pause, which the caller keeps or gives up.

        Raises:
            CommandRefused: another command has ended the wait.
        """

    async def resume(self) -> None:
        """Run steps again; nothing happens if the engine is not paused."""

    async def reset_prefix_cache(self, *, preempt: bool = False, external: bool = False) -> None:
        """Let later requests find no blocks of earlier ones.

        Args:
            preempt: requests that have begun compute their tokens anew. Else they keep their blocks.
            external: the blocks of the second tier are forgotten as well.

        Raises:
            CommandRefused: requests of this model cannot be preempted, or it has no second tier.
        """

    async def reset_encoder_cache(self) -> None:
        """Let audio, pictures and videos be encoded anew."""

    async def update_weights(self, folder: Path, mode: PauseMode) -> None:
        """Replace the weights by those in a folder, and forget all caches.

        Args:
            folder: a model that differs from this one in the values of its weights only.
            mode: requests that have begun are aborted, or end first, or go on with the new weights.

        Raises:
            RequestRefused: the folder has no such model; the weights are those before.
            CommandRefused: the engine sleeps, or cannot replace weights while requests run.
        """

    async def start_profile(self) -> None:
        """Record steps with the profiler.

        Raises:
            CommandRefused: it records already, or is not configured.
        """

    async def stop_profile(self) -> None:
        """Write what the profiler has recorded.

        Raises:
            CommandRefused: it records nothing, or the file cannot be written.
        """


class CommandSender(Commands):
    """Send commands to the core of a client, and wait until they are done."""

    def __init__(self, client: CommandedClient) -> None:
        self._client = client
        self._serials = itertools.count()
        self._replies: dict[int, asyncio.Future[CommandDone]] = {}
        self._updating = asyncio.Lock()
        self._stays_paused = False  # until `resume`
        self._begun: set[BegunPause] = set()  # pauses of requests that are being answered

    @property
    @override
    def is_paused(self) -> bool:
        return self._stays_paused or bool(self._begun)

    @override
    async def pause(self, mode: PauseMode) -> BegunPause:
        if mode == "abort":
            await self._end_all("paused")
        return await self._pause(drain=mode == "wait")

    async def _end_all(self, reason: Notice) -> None:
        """Abort all requests to the engine."""
        self.heed(reason)
        await self._client.siblings.tell(reason)

    def heed(self, notice: Notice) -> None:
        """Abort the requests of this front end."""
        self._client.end_all(RequestAborted(_ABORTED_FOR[notice]))

    def learned(self, *, is_paused: bool) -> None:
        """Another front end has paused the engine, or let it go on."""
        if is_paused:
            self._stays_paused = True
        else:
            self._forget_pauses()

    async def flush(self) -> None:
        """Wait until the core has handled all that was sent to it."""
        await self._run(ResetCaches())

    async def _pause(self, *, drain: bool, is_temporary: bool = False) -> BegunPause:
        begun = BegunPause(self)
        self._begun.add(begun)
        try:
            await self._run(Pause(drain=drain, is_temporary=is_temporary))
        except asyncio.CancelledError:
            begun.give_up()
            raise
        except EngineError:
            self._begun.discard(begun)
            raise
        return begun

    def keep(self, begun: BegunPause) -> None:
        """See `BegunPause`."""
        if begun in self._begun:
            self._begun.remove(begun)
            self._stays_paused = True

    def give_up(self, begun: BegunPause) -> None:
        """See `BegunPause`."""
        command = self._command_after(begun)
        if command is not None:
            with suppress(EngineDead):
                self._client.send_control(RunCommand(next(self._serials), command))

    def _command_after(self, begun: BegunPause) -> Pause | Resume | None:
        """The command that ends a pause; None: it has ended, or others want one as well."""
        if begun not in self._begun:
            return None
        self._begun.remove(begun)
        if self._begun:
            return None  # the engine is paused, or drains, for them too
        return Pause() if self._stays_paused else Resume()

    @override
    async def resume(self) -> None:
        self._forget_pauses()
        await self._run(Resume())

    def _forget_pauses(self) -> None:
        self._stays_paused = False
        self._begun.clear()

    @override
    async def reset_prefix_cache(self, *, preempt: bool = False, external: bool = False) -> None:
        await self._run(ResetCaches(prefixes=True, preempt=preempt, external=external))

    @override
    async def reset_encoder_cache(self) -> None:
        await self._run(ResetCaches(items=True))

    @override
    async def update_weights(self, folder: Path, mode: PauseMode) -> None:
        async with self._updating:
            if mode == "abort":
                await self._end_all("updated")
            begun = None
            if mode == "wait" and not self._stays_paused:
                begun = await self._pause(drain=True, is_temporary=True)
            try:
                await self._run(UpdateWeights(str(folder)))
            finally:
                if begun is not None and (command := self._command_after(begun)) is not None:
                    await self._run(command)

    @override
    async def start_profile(self) -> None:
        await self._run(StartProfile())

    @override
    async def stop_profile(self) -> None:
        await self._run(StopProfile())

    def received(self, done: CommandDone) -> None:
        """The core has answered."""
        reply = self._replies.get(done.serial)
        if reply is not None and not reply.done():
            reply.set_result(done)

    def ended(self, error: EngineDead) -> None:
        """The core has ended; another one is not paused."""
        self._forget_pauses()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

    async def _run(self, command: Command) -> None:
        serial = next(self._serials)
        reply = self._replies[serial] = asyncio.get_running_loop().create_future()
        try:
            self._client.send_control(RunCommand(serial, command))
            done = await reply
        finally:
            del self._replies[serial]
        if done.error is not None:
            raise (RequestRefused if done.invalid else CommandRefused)(done.error)


class PauseKeeper(Protocol):
    """Who has begun a pause, and can end it."""

    def keep(self, begun: BegunPause) -> None:
        """Stay paused until `Commands.resume`."""

    def give_up(self, begun: BegunPause) -> None:
        """Leave the engine as it was, or as others want it."""


class BegunPause:
    """A pause that is in force. The request for it ends with one of the methods; whichever comes later has no effect.

    Neither has an effect after `Commands.resume`.
    """

    def __init__(self, sender: PauseKeeper) -> None:
        self._sender = sender

    def keep(self) -> None:
        """Stay paused until `Commands.resume`."""
        self._sender.keep(self)

    def give_up(self) -> None:
        """Leave the engine as it was, or as others want it."""
        self._sender.give_up(self)
