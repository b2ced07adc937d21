"""Sleep of an engine, seen by its client: which requests run, and which are refused or aborted."""

from __future__ import annotations

import asyncio

import pytest
from typing_extensions import override

from quire.engine.client.errors import EngineAsleep, EngineDead, EngineError, SleepFailed
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import MemoryTag, Sleep, SleepLevel, SleepState, Wake
from quire.engine.client.sleep import SleepControl, SleepingClient
from quire.engine.client.stream import PoolRequest
from tests.support.fake_core import FakeCore, prompt_of, running_client, says
from tests.support.server import until
from tests.support.text_requests import collect, text_request

TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")


def changes(core: FakeCore) -> list[object]:
    """The messages about sleep that a core has received."""
    return [message for message in core.received if isinstance(message, Sleep | Wake)]


async def test_requests_are_refused_while_the_engine_sleeps() -> None:
    core = FakeCore()
    async with running_client(core) as client:
        await client.sleeping.sleep(1)
        with pytest.raises(EngineAsleep, match="/wake_up"), client.slots(1):
            pass
        with pytest.raises(EngineAsleep, match="/wake_up"):
            await collect(client, text_request())
        with pytest.raises(EngineAsleep, match="/wake_up"):
            await client.pool(PoolRequest(prompt=prompt_of("a"), params=PoolingParams(task="embed")))
        with pytest.raises(EngineAsleep, match="/wake_up"), client.pool_batch():
            pass
        await client.sleeping.wake_up(TAGS)
        with client.slots(1):
            assert (await collect(client, text_request()))[0] == "HELLO"


async def test_running_requests_are_aborted() -> None:
    core = FakeCore(answer=says("x" * 50))
    core.hold.set()
    async with running_client(core) as client:
        running = asyncio.create_task(collect(client, text_request()))
        await until(lambda: core.active)
        await client.sleeping.sleep(2)
        with pytest.raises(EngineAsleep, match="aborted"):
            await running
        assert not core.active
        assert changes(core) == [Sleep(2)]
        assert client.is_idle


async def test_with_wait_running_requests_end_and_new_ones_are_refused() -> None:
    core = FakeCore(answer=says("x" * 50))
    core.hold.set()
    async with running_client(core) as client:
        with client.slots(1):
            running = asyncio.create_task(collect(client, text_request()))
            await until(lambda: core.active)
            sleeping = asyncio.create_task(client.sleeping.sleep(1, wait=True))
            await until(lambda: client.refusal_of_new)
            with pytest.raises(EngineAsleep), client.slots(1):
                pass
            assert not changes(core)
            core.hold.clear()
            assert (await running)[0] == "x" * 50
            # A request that has begun may have several sequences, one after the other.
            assert (await collect(client, text_request()))[0] == "x" * 50
            assert not changes(core)
        await sleeping
        assert changes(core) == [Sleep(1)]


async def test_wake_up_without_sleep_is_not_sent() -> None:
    core = FakeCore()
    async with running_client(core) as client:
        await client.sleeping.wake_up(TAGS)
        await collect(client, text_request())
        assert not changes(core)


async def test_sleep_and_wake_up_at_once_happen_one_after_the_other() -> None:
    core = FakeCore()
    async with running_client(core) as client:
        control = client.sleeping
        await asyncio.gather(control.sleep(1), control.sleep(2), control.wake_up(TAGS), control.wake_up(TAGS))
        assert changes(core) == [Sleep(1), Sleep(2), Wake(frozenset(TAGS))]
        assert (await collect(client, text_request()))[0] == "HELLO"


async def test_a_failed_wake_up_can_be_repeated() -> None:
    core = FakeCore(wake_error="no memory")
    async with running_client(core) as client:
        await client.sleeping.sleep(1)
        with pytest.raises(SleepFailed, match="no memory"):
            await client.sleeping.wake_up(TAGS)
        with pytest.raises(EngineAsleep):
            await collect(client, text_request())
        core.wake_error = None
        await client.sleeping.wake_up(TAGS)
        assert (await collect(client, text_request()))[0] == "HELLO"


async def test_the_end_of_the_engine_ends_the_wait_for_it() -> None:
    core = FakeCore()
    async with running_client(core) as client:
        core.deaf.set()
        sleeping = asyncio.create_task(client.sleeping.sleep(1))
        await until(lambda: client.refusal)
        client.fail("it was killed")
        with pytest.raises(EngineDead, match="killed"):
            await sleeping
        with pytest.raises(EngineDead, match="killed"):
            await client.sleeping.sleep(1, wait=True)


class SlowClient(SleepingClient):
    """The client of an idle engine that has not answered yet; it keeps the messages that were sent."""

    is_idle, dead = True, None

    def __init__(self) -> None:
        self.sent: list[Sleep | Wake] = []
        self.levels: list[int] = []

    @override
    def end_all(self, error: EngineError) -> None:
        """There are no requests."""

    @override
    def on_sleep(self, asleep: frozenset[MemoryTag], level: SleepLevel) -> None:
        self.levels.append(level if asleep else 0)

    @override
    def send_control(self, message: Sleep | Wake) -> None:
        self.sent.append(message)


async def test_an_engine_that_was_told_to_sleep_does_so_although_the_caller_is_cancelled() -> None:
    client = SlowClient()
    control = SleepControl(client)
    cancelled = asyncio.create_task(control.sleep(1, wait=True))
    await until(lambda: client.sent)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert control.refusal is not None
    deeper = asyncio.create_task(control.sleep(2))
    waking = asyncio.create_task(control.wake_up(TAGS))
    control.received(SleepState(frozenset(TAGS)))
    await until(lambda: len(client.sent) > 1)
    assert client.sent == [Sleep(1), Sleep(2)]  # the answer to the first message is not taken for that to the second
    assert not deeper.done()
    control.received(SleepState(frozenset(TAGS)))
    await deeper
    await until(lambda: len(client.sent) > 2)
    assert client.sent[2] == Wake(frozenset(TAGS))
    control.received(SleepState(frozenset()))
    await waking
    assert control.refusal is control.refusal_of_new is None


async def test_a_cancelled_wake_up_is_completed() -> None:
    client = SlowClient()
    control = SleepControl(client)
    control.received(SleepState(frozenset(TAGS)))
    cancelled = asyncio.create_task(control.wake_up(TAGS))
    await until(lambda: client.sent)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    again = asyncio.create_task(control.wake_up(TAGS))
    await asyncio.sleep(0)  # it now waits for the first one
    control.received(SleepState(frozenset()))
    await again
    assert client.sent == [Wake(frozenset(TAGS))]
