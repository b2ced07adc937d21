"""Several front ends before one core: each gets its own outputs, and what ends with it is aborted."""

from __future__ import annotations

import asyncio
import select
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from quire.engine.client.protocol import (
    Abort,
    AddRequest,
    AddRequests,
    ClientMessage,
    CommandDone,
    CoreDied,
    CoreMessage,
    EngineState,
    ErrorOutput,
    ExtendRequest,
    FrontEndLeft,
    MemoryTag,
    Pause,
    Ping,
    Pong,
    ResetCaches,
    Resume,
    RunCommand,
    Shutdown,
    Sleep,
    SleepState,
    StepOutput,
    StepStats,
    TokensOutput,
    UpdateWeights,
    Wake,
)
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.shared_channel import PARENT, FrontEndChannel, SharedCoreChannel

STATS = StepStats(running=2, waiting=1, blocks_used=5, blocks_total=9, step_tokens=7, prefix_hits=3, step=4)
GAUGES = StepStats(running=2, waiting=1, blocks_used=5, blocks_total=9)
BOTH: frozenset[MemoryTag] = frozenset(("weights", "kv_cache"))


@dataclass
class Front:
    """A front end, and what it has got."""

    channel: FrontEndChannel
    got: list[CoreMessage] = field(default_factory=list)

    def take(self) -> list[CoreMessage]:
        got = list(self.got)
        self.got.clear()
        return got

    @property
    def ids(self) -> list[str]:
        return [output.request_id for message in self.got for output in message.outputs]  # type: ignore[union-attr]


class Shared:
    """A core's channel with its front ends."""

    def __init__(self, address: str) -> None:
        self.core = SharedCoreChannel(address)
        self._address = address
        self._channels: list[FrontEndChannel] = []

    async def front(self, identity: str) -> Front:
        """A front end that has been welcomed."""
        front = Front(FrontEndChannel(self._address, identity))
        self._channels.append(front.channel)
        front.channel.listen(front.got.append)
        async with asyncio.timeout(60):
            while not front.got:
                assert self.core.receive(0.0) is None
                await asyncio.sleep(0.001)
        return front

    async def next(self) -> ClientMessage:
        """The next message that the core gets."""
        async with asyncio.timeout(60):
            while (message := self.core.receive(0.0)) is None:
                await asyncio.sleep(0.001)
            return message

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self.core.close()


@contextmanager
def shared() -> Iterator[Shared]:
    with tempfile.TemporaryDirectory() as folder:
        made = Shared(f"ipc://{folder}/engine")
        try:
            yield made
        finally:
            made.close()


async def until_it_has(front: Front, count: int) -> None:
    async with asyncio.timeout(60):
        while len(front.got) < count:
            await asyncio.sleep(0.001)


def request(request_id: str) -> AddRequest:
    return AddRequest(request_id, np.arange(3, dtype=np.int32), SamplingParams(max_tokens=4))


async def test_something_can_be_read_from_the_inbox_when_any_front_end_has_sent_a_message() -> None:
    with shared() as all_of_them:
        fronts, core = [await all_of_them.front(identity) for identity in ("0.1", "1.1")], all_of_them.core
        for number in range(20):
            assert core.receive(0.0) is None
            assert select.select([core.inbox], [], [], 0.0)[0] == []
            fronts[number % 2].channel.send(request(f"r{number}"))
            assert (await asyncio.to_thread(select.select, [core.inbox], [], [], 30.0))[0] == [core.inbox]
            assert (await all_of_them.next()).request_id == f"r{number}"  # type: ignore[union-attr]


async def test_each_gets_its_own_outputs_and_one_gets_what_the_step_counts() -> None:
    with shared() as all_of_them:
        first, second = await all_of_them.front("0.1"), await all_of_them.front("1.1")
        first.take(), second.take()
        first.channel.send(request("a"))
        assert (await all_of_them.next()).request_id == "a"  # type: ignore[union-attr]
        second.channel.send(AddRequests([request("b"), request("c")]))
        assert [(await all_of_them.next()).request_id for _ in "bc"] == ["b", "c"]  # type: ignore[union-attr]
        core = all_of_them.core
        core.send(StepOutput([TokensOutput("a", [1]), TokensOutput("b", [2]), TokensOutput("c", [3], "length")], STATS))
        await until_it_has(first, 1)
        await until_it_has(second, 1)
        assert first.take() == [StepOutput([TokensOutput("a", [1])], GAUGES)]
        assert second.ids == ["b", "c"]
        assert second.take()[0].stats == STATS  # type: ignore[union-attr]
        core.send(StepOutput([TokensOutput("c", [3]), TokensOutput("a", [1])], STATS))  # one that has ended
        await until_it_has(first, 1)
        assert first.take() == [StepOutput([TokensOutput("a", [1])], STATS)]
        core.send(StepOutput([], STATS))  # the engine has become idle, which all show
        await until_it_has(second, 1)
        await until_it_has(first, 1)
        assert [*first.take(), *second.take()] == [StepOutput([], STATS), StepOutput([], GAUGES)]


async def test_the_requests_of_one_that_has_ended_are_aborted_and_nothing_of_it_is_taken_any_more() -> None:
    with shared() as all_of_them:
        first, second = await all_of_them.front("0.1"), await all_of_them.front("1.1")
        for front, name in ((first, "a"), (second, "b"), (first, "c")):
            front.channel.send(request(name))
            await all_of_them.next()
        second.channel.send(FrontEndLeft("0.1"))
        assert await all_of_them.next() == Abort(["a", "c"])
        first.channel.send(request("late"))
        second.channel.send(Ping(1))
        assert await all_of_them.next() == Ping(1), "the late request was dropped"
        second.channel.send(FrontEndLeft("0.1"))  # another one has seen it as well
        second.channel.send(Ping(2))
        assert await all_of_them.next() == Ping(2)


async def test_a_process_in_place_of_another_one_ends_the_requests_of_that() -> None:
    with shared() as all_of_them:
        first = await all_of_them.front("0.1")
        first.channel.send(request("a"))
        await all_of_them.next()
        successor = FrontEndChannel(all_of_them._address, "0.2")
        assert await all_of_them.next() == Abort(["a"])
        successor.close()


async def test_nobody_touches_the_requests_of_others() -> None:
    with shared() as all_of_them:
        first, second = await all_of_them.front("0.1"), await all_of_them.front("1.1")
        second.take()
        first.channel.send(request("a"))
        await all_of_them.next()
        second.channel.send(request("a"))
        second.channel.send(Abort(["a"]))
        second.channel.send(ExtendRequest("a", np.arange(1, dtype=np.int32)))
        second.channel.send(Ping(3))
        assert await all_of_them.next() == Ping(3)
        await until_it_has(second, 1)
        (refusal,) = second.take()[0].outputs  # type: ignore[union-attr]
        assert isinstance(refusal, ErrorOutput)
        assert "in use" in refusal.error
        all_of_them.core.send(StepOutput([TokensOutput("a", [1])], STATS))
        await until_it_has(first, 2)
        assert first.got[-1].outputs == [TokensOutput("a", [1])]  # type: ignore[union-attr]


async def test_answers_go_to_who_has_asked_and_all_learn_what_has_become_of_the_engine() -> None:
    with shared() as all_of_them:
        core = all_of_them.core
        first, second = await all_of_them.front("0.1"), await all_of_them.front("1.1")
        first.take(), second.take()
        for front, level in ((first, 2), (second, 1)):
            front.channel.send(Sleep(level))  # type: ignore[arg-type]
            assert isinstance(await all_of_them.next(), Sleep)
        core.send(SleepState(BOTH))
        await until_it_has(first, 1)
        await until_it_has(second, 1)
        assert first.take() == [SleepState(BOTH)]
        assert second.take() == [EngineState(BOTH, level=2)]
        core.send(SleepState(BOTH))
        await until_it_has(first, 1)
        assert first.take() == [EngineState(BOTH, level=2)], "the deeper level counts"
        later = await all_of_them.front("2.1")
        assert later.take()[0] == EngineState(BOTH, level=2)
        second.channel.send(Wake(BOTH))
        await all_of_them.next()
        core.send(SleepState(frozenset()))
        await until_it_has(later, 1)
        assert later.take() == [EngineState(level=2)]


async def test_serials_of_commands_may_be_equal_and_pauses_are_told_to_the_others() -> None:
    with shared() as all_of_them:
        core = all_of_them.core
        first, second = await all_of_them.front("0.1"), await all_of_them.front("1.1")
        first.take(), second.take()
        first.channel.send(RunCommand(0, ResetCaches(prefixes=True)))
        one = await all_of_them.next()
        second.channel.send(RunCommand(0, Pause()))
        other = await all_of_them.next()
        assert isinstance(one, RunCommand)
        assert isinstance(other, RunCommand)
        assert one.serial != other.serial
        core.send(CommandDone(other.serial))
        core.send(CommandDone(one.serial, "not now"))
        await until_it_has(first, 2)
        await until_it_has(second, 1)
        assert first.take() == [EngineState(is_paused=True), CommandDone(0, "not now")]
        assert second.take() == [CommandDone(0)]


@pytest.mark.parametrize("before", [Resume(), Pause()])
async def test_a_pause_that_waits_ends_with_the_process_that_wanted_it(before: Pause | Resume) -> None:
    with shared() as all_of_them:
        first, second = await all_of_them.front("0.1"), await all_of_them.front("1.1")
        second.channel.send(RunCommand(0, before))
        await all_of_them.next()
        first.channel.send(RunCommand(1, Pause(drain=True)))
        await all_of_them.next()
        second.channel.send(FrontEndLeft("0.1"))
        undone = await all_of_them.next()
        assert isinstance(undone, RunCommand)
        assert undone.command == before


@pytest.mark.parametrize(("kept", "undone"), [(None, Resume()), (Pause(), Pause()), (Resume(), Resume())])
async def test_a_pause_for_new_weights_ends_with_the_process_that_wanted_it(
    kept: Pause | Resume | None, undone: Pause | Resume
) -> None:
    with shared() as all_of_them:
        core = all_of_them.core
        first, second = await all_of_them.front("0.1"), await all_of_them.front("1.1")
        first.channel.send(RunCommand(1, Pause(drain=True, is_temporary=True)))
        pause = await all_of_them.next()
        assert isinstance(pause, RunCommand)
        core.send(CommandDone(pause.serial))
        if kept is not None:
            second.channel.send(RunCommand(0, kept))
            await all_of_them.next()
        first.channel.send(RunCommand(2, UpdateWeights("new")))
        update = await all_of_them.next()
        assert isinstance(update, RunCommand)
        second.channel.send(FrontEndLeft("0.1"))
        command = await all_of_them.next()
        assert isinstance(command, RunCommand)
        assert command.command == undone
        second.take()
        core.send(CommandDone(update.serial))
        await until_it_has(second, 1)
        assert second.take()[-1] == EngineState(is_paused=undone == Pause(), weights="new"), "later ones get the same"


async def test_a_pause_for_new_weights_that_has_ended_is_not_ended_again() -> None:
    with shared() as all_of_them:
        first, second = await all_of_them.front("0.1"), await all_of_them.front("1.1")
        for command in (Pause(drain=True, is_temporary=True), Resume()):
            first.channel.send(RunCommand(1, command))
            await all_of_them.next()
        second.channel.send(FrontEndLeft("0.1"))
        second.channel.send(Ping(1))
        assert await all_of_them.next() == Ping(1)


async def test_only_the_parent_ends_the_core_and_all_learn_of_its_death() -> None:
    with shared() as all_of_them:
        first, second = await all_of_them.front("0.1"), await all_of_them.front("1.1")
        first.channel.send(request("a"))
        await all_of_them.next()
        first.channel.send(Shutdown())
        assert await all_of_them.next() == Abort(["a"]), "it leaves"
        FrontEndChannel(all_of_them._address, PARENT).send_last()
        assert await all_of_them.next() == Shutdown()
        second.take()
        all_of_them.core.send(CoreDied("out of memory"))
        await until_it_has(second, 1)
        assert second.take() == [CoreDied("out of memory")]


async def test_a_ping_is_answered_with_the_gauges_of_the_engine() -> None:
    with shared() as all_of_them:
        first, second = await all_of_them.front("0.1"), await all_of_them.front("1.1")
        second.channel.send(request("b"))
        await all_of_them.next()
        all_of_them.core.send(StepOutput([TokensOutput("b", [1])], STATS))
        first.take()
        first.channel.send(Ping(5))
        await all_of_them.next()
        all_of_them.core.send(Pong(5))
        await until_it_has(first, 2)
        assert first.take() == [Pong(5), StepOutput([], GAUGES)]
