"""Which replica gets a request, and what happens to the others when one dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.client.errors import EngineAsleep, EngineDead, EngineOverloaded, RequestRefused
from quire.engine.client.origin import Origin, set_current_origin
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import (
    Abort,
    AddRequest,
    ExtendRequest,
    Pause,
    ResetCaches,
    Resume,
    RunCommand,
    Sleep,
    UpdateWeights,
    Wake,
)
from quire.engine.client.replicas.replica import end_stalled
from quire.engine.client.replicas.replica_set import ReplicaSet
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.stream import GenerateRequest, PoolRequest
from tests.support.fake_core import FakeCore, prompt_of
from tests.support.replicas import nothing_is_held, running_set
from tests.support.server import until
from tests.support.text_requests import collect, text_request
from tests.support.tokenizer import byte_tokenizer

LONG = "the beginning of a long conversation, which fills some blocks of the cache. " * 3


def prompts(core: FakeCore) -> list[str]:
    """The texts of the requests that a core has got."""
    messages = [message for message in core.received if isinstance(message, AddRequest)]
    return [byte_tokenizer().decode(message.prompt.tolist()) for message in messages]


def counts(*cores: FakeCore) -> list[int]:
    return [len(prompts(core)) for core in cores]


def nothing_runs(engine: ReplicaSet) -> bool:
    return engine.dead is not None


def commands(core: FakeCore) -> list[object]:
    return [message.command for message in core.received if isinstance(message, RunCommand)]


async def hung(engine: ReplicaSet, text: str, max_tokens: int = 100) -> asyncio.Task[object]:
    """A request that has been sent to its replica, which is on hold."""
    task: asyncio.Task[object] = asyncio.create_task(collect(engine, text_request(text, max_tokens=max_tokens)))
    before = engine.open_streams
    await until(lambda: engine.open_streams > before)
    return task


async def test_unlike_prompts_go_round() -> None:
    cores = FakeCore(), FakeCore(), FakeCore()
    async with running_set(*cores) as replicas:
        for index in range(9):
            assert (await collect(replicas.set, text_request(f"{index} is new")))[0] == f"{index} IS NEW"
        assert counts(*cores) == [3, 3, 3]
        assert nothing_is_held(replicas)


async def test_a_conversation_stays_where_its_prefix_is() -> None:
    cores = FakeCore(), FakeCore()
    async with running_set(*cores) as replicas:
        for turn in range(1, 6):
            for who in "ab":
                await collect(replicas.set, text_request(who + LONG + "and more. " * turn))
        assert [{prompt[0] for prompt in prompts(core)} for core in cores] in (
            [{"a"}, {"b"}],
            [{"b"}, {"a"}],
        )


async def test_a_conversation_leaves_a_replica_with_more_work_than_it_saves() -> None:
    cores = FakeCore(), FakeCore()
    async with running_set(*cores) as replicas:
        await collect(replicas.set, text_request("a" + LONG))
        busy, idle = cores if counts(*cores) == [1, 0] else cores[::-1]
        busy.hold.set()
        idle.hold.set()
        tasks = [await hung(replicas.set, "a" + LONG + end) for end in "bc"]
        await until(lambda: counts(busy, idle) == [3, 0])  # less is waiting there than the prefix saves
        while not prompts(idle):
            tasks.append(await hung(replicas.set, f"a{LONG}{len(tasks)}"))
            await until(lambda: sum(counts(busy, idle)) == 1 + len(tasks))
        assert len(tasks) < 10
        busy.hold.clear()
        idle.hold.clear()
        await asyncio.gather(*tasks)
        assert nothing_is_held(replicas)


async def test_the_answers_of_a_request_share_the_blocks_of_its_prompt() -> None:
    cores = FakeCore(), FakeCore()
    async with running_set(*cores) as replicas:
        request = text_request(LONG, max_tokens=1)
        await asyncio.gather(*(collect(replicas.set, request) for _ in range(4)))
        assert sorted(counts(*cores)) == [0, 4]


async def test_a_request_can_name_its_replica() -> None:
    cores = FakeCore(), FakeCore()
    async with running_set(*cores) as replicas:
        set_current_origin(Origin(data_parallel_rank="1"))
        for index in range(3):
            with replicas.set.slots(1):
                await collect(replicas.set, text_request(f"{index}"))
        assert counts(*cores) == [0, 3]
        for bad in ("2", "-1", "x", "1.0", "\u0661", "9" * 5000):
            set_current_origin(Origin(data_parallel_rank=bad))
            with pytest.raises(RequestRefused, match="must be a number from 0 to 1"), replicas.set.slots(1):
                pass
        replicas.set.set_leaving(replicas.set.replicas[1:], is_leaving=True)
        set_current_origin(Origin(data_parallel_rank="1"))
        with pytest.raises(EngineDead, match="Replica 1 of the model"):
            await collect(replicas.set, text_request())
        assert nothing_is_held(replicas)


async def test_one_engine_accepts_its_own_rank() -> None:
    async with running_set(FakeCore(), FakeCore()) as replicas:
        client = replicas.clients[1]
        set_current_origin(Origin(data_parallel_rank="1"))
        with client.slots(1):
            pass
        set_current_origin(Origin(data_parallel_rank="0"))
        with pytest.raises(RequestRefused, match="x-data-parallel-rank is '0', but must be 1"), client.slots(1):
            pass


async def test_only_the_requests_of_a_replica_that_dies_fail_and_others_take_over() -> None:
    cores = FakeCore(die_at_step=3), FakeCore()
    cores[0].hold.set()
    async with running_set(*cores) as replicas:
        requests = (text_request(f"{index} of many") for index in range(8))
        tasks = [asyncio.create_task(collect(replicas.set, request)) for request in requests]
        await until(lambda: counts(*cores) == [4, 4])
        cores[0].hold.clear()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [result for result in results if isinstance(result, EngineDead)]
        assert len(failed) == counts(*cores)[0] == 4
        assert all("told to die" in str(error) for error in failed)
        assert replicas.set.dead is None
        assert [replica.state for replica in replicas.set.replicas] == ["dead", "ready"]
        for index in range(4):
            await collect(replicas.set, text_request(f"{index} later"))
        assert counts(*cores) == [4, 8]
        assert nothing_is_held(replicas)
        waiting = asyncio.create_task(replicas.set.wait_until_dead())
        replicas.clients[1].fail("killed")
        with pytest.raises(EngineDead):
            await waiting
        assert nothing_runs(replicas.set)
        with pytest.raises(EngineDead), replicas.set.slots(1):
            pass


async def test_a_replica_that_is_started_again_has_forgotten_its_prefixes() -> None:
    cores = FakeCore(die_at_step=100), FakeCore()
    async with running_set(*cores) as replicas:
        first = replicas.set.replicas[0]
        assert first.prefixes is not None
        first.prefixes.add([1, 2, 3])
        first.client.fail("killed")
        assert len(first.prefixes) == 0
        info = await replicas.restart(first, core := FakeCore())
        await collect(replicas.set, text_request("before it has entered"))
        assert first.state == "starting"
        await replicas.set.enter(first, info)
        for index in range(2):
            await collect(replicas.set, text_request(f"{index}"))
        assert counts(core) == [1]


async def test_what_extends_a_request_goes_to_its_replica() -> None:
    cores = FakeCore(), FakeCore()
    for core in cores:
        core.hold.set()
    async with running_set(*cores) as replicas:
        requests = [
            GenerateRequest(prompt=prompt_of("x"), params=SamplingParams(max_tokens=2), open=True, request_id=name)
            for name in "abcd"
        ]
        tasks = [asyncio.create_task(collect(replicas.set, request)) for request in requests]
        await until(lambda: replicas.set.open_streams == 4)
        for name in "abcd":
            replicas.set.extend(name, np.array([1, 2, 3], np.int32), last=True)
        replicas.set.extend("unknown", np.array([1], np.int32))  # is ignored
        await until(lambda: sum(isinstance(m, ExtendRequest) for core in cores for m in core.received) == 4)
        for core in cores:
            added = {message.request_id for message in core.received if isinstance(message, AddRequest)}
            extended = {message.request_id for message in core.received if isinstance(message, ExtendRequest)}
            assert added == extended
            assert len(added) == 2
            core.hold.clear()
        await asyncio.gather(*tasks)
        assert nothing_is_held(replicas)


async def test_a_stream_that_is_closed_is_aborted_in_its_replica() -> None:
    cores = FakeCore(), FakeCore()
    for core in cores:
        core.hold.set()
        core.allow(1)
    async with running_set(*cores) as replicas:
        async with aclosing(replicas.set.generate(text_request("closed" * 40))) as deltas:
            await anext(deltas)
        await until(lambda: any(isinstance(message, Abort) for core in cores for message in core.received))
        assert nothing_is_held(replicas)


def pool_requests(count: int) -> list[PoolRequest]:
    params = PoolingParams(task="embed")
    return [PoolRequest(prompt=prompt_of(f"request {index}"), params=params) for index in range(count)]


async def test_a_batch_is_divided_and_its_results_have_its_order() -> None:
    cores = FakeCore(), FakeCore()
    async with running_set(*cores, capacity=32) as replicas:
        requests = pool_requests(200)
        with replicas.set.slots(1), replicas.set.pool_batch() as batch:
            batch.add(requests)
            arrays = await batch.results()
        assert all(np.array_equal(array, request.prompt) for array, request in zip(arrays, requests, strict=True))
        assert min(counts(*cores)) >= 25  # of 200: cores that answer at once share them as their threads run
        assert np.array_equal((await replicas.set.pool(requests[0])).data, requests[0].prompt)
        assert nothing_is_held(replicas)


async def test_a_batch_fails_if_a_replica_dies_and_leaves_nothing() -> None:
    cores = FakeCore(die_at_step=2), FakeCore()
    async with running_set(*cores, capacity=16) as replicas:
        with replicas.set.slots(1), replicas.set.pool_batch() as batch:
            batch.add(pool_requests(100))
            with pytest.raises(EngineDead):
                await batch.results()
        await until(lambda: nothing_is_held(replicas))


async def test_the_queue_grows_with_the_replicas() -> None:
    async with running_set(FakeCore(), capacity=2) as replicas:
        with pytest.raises(EngineOverloaded), replicas.set.slots(3):
            pass
        added = await replicas.add(FakeCore())
        with replicas.set.slots(3):
            assert replicas.set.slots_in_use == 3
        replicas.set.set_leaving([added], is_leaving=True)
        assert replicas.set.capacity == 2


async def test_all_replicas_sleep_and_wake_and_one_that_enters_later_does_as_they_do() -> None:
    cores = FakeCore(), FakeCore()
    async with running_set(*cores) as replicas:
        await replicas.set.sleeping.sleep(2)
        assert replicas.set.sleeping.asleep == {"weights", "kv_cache"}
        with pytest.raises(EngineAsleep), replicas.set.slots(1):
            pass
        await replicas.add(later := FakeCore())
        with pytest.raises(EngineAsleep):
            await collect(replicas.set, text_request())
        await replicas.set.sleeping.wake_up(["weights", "kv_cache"])
        for core in (*cores, later):
            assert Sleep(2) in core.received
            assert any(isinstance(message, Wake) for message in core.received)
        assert not replicas.set.sleeping.asleep
        assert (await collect(replicas.set, text_request()))[0] == "HELLO"


async def test_commands_go_to_all_replicas_and_a_later_one_catches_up() -> None:
    cores = FakeCore(), FakeCore()
    async with running_set(*cores) as replicas:
        operator = replicas.set.commands
        await operator.reset_prefix_cache(external=True)
        await operator.update_weights(Path("/new"), "abort")
        begun = await operator.pause("keep")
        assert operator.is_paused
        await replicas.add(later := FakeCore())
        assert commands(later) == [UpdateWeights("/new"), Pause()]
        begun.keep()
        begun.give_up()  # comes later
        assert operator.is_paused
        await operator.resume()
        assert not replicas.set.commands.is_paused
        for core in cores:
            assert commands(core) == [
                ResetCaches(prefixes=True, external=True),
                UpdateWeights("/new"),
                Pause(),
                Resume(),
            ]
        assert commands(later)[-1] == Resume()
        assert (await collect(replicas.set, text_request()))[0] == "HELLO"


async def test_a_pause_that_is_given_up_leaves_no_replica_paused() -> None:
    cores = FakeCore(), FakeCore()
    async with running_set(*cores) as replicas:
        (await replicas.set.commands.pause("keep")).give_up()
        assert not replicas.set.commands.is_paused
        await asyncio.gather(*(collect(replicas.set, text_request(f"{index}")) for index in range(4)))
        for core in cores:
            core.hold.set()
        task = await hung(replicas.set, "waits")
        other = await hung(replicas.set, "waits too")
        pausing = asyncio.create_task(replicas.set.commands.pause("wait"))
        await until(lambda: all(Pause(drain=True) in commands(core) for core in cores))
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        for core in cores:
            core.hold.clear()
        await asyncio.gather(task, other)
        await asyncio.gather(*(collect(replicas.set, text_request(f"{index}")) for index in range(4)))


async def test_weights_that_one_replica_refuses_make_it_start_again_and_those_that_all_refuse_are_refused() -> None:
    good, bad = FakeCore(), FakeCore(command_error=("no memory", False))
    async with running_set(good, bad) as replicas:
        await replicas.set.commands.update_weights(Path("/new"), "abort")
        assert [replica.state for replica in replicas.set.replicas] == ["ready", "dead"]
        good.command_error = ("not this model", True)
        with pytest.raises(RequestRefused, match="not this model"):
            await replicas.set.commands.update_weights(Path("/other"), "abort")
        info = await replicas.restart(replicas.set.replicas[1], again := FakeCore(command_error=("gone", False)))
        with pytest.raises(EngineDead, match="cannot become as the other replicas are: gone"):
            await replicas.set.enter(replicas.set.replicas[1], info)
        assert commands(again) == [UpdateWeights("/new")]


async def test_a_replica_that_enters_while_an_operator_changes_the_others_is_changed_too() -> None:
    stays, dies = FakeCore(), FakeCore()
    async with running_set(stays, dies) as replicas:
        for begin, done in (
            (replicas.set.commands.update_weights(Path("/new"), "abort"), UpdateWeights("/new")),
            (replicas.set.commands.pause("keep"), Pause()),
        ):
            replica = replicas.set.replicas[1]
            replica.client.fail("it was killed")
            stays.deaf.set()
            operation: asyncio.Task[object] = asyncio.create_task(begin)
            await asyncio.sleep(0)  # it is under way
            info = await replicas.restart(replica, again := FakeCore())
            entering = asyncio.create_task(replicas.set.enter(replica, info))
            await asyncio.sleep(0)
            stays.deaf.clear()
            await operation
            await entering
            assert commands(again)[-1] == done
            assert replica.is_ready


async def test_an_operation_that_begins_while_a_replica_catches_up_is_done_there_too() -> None:
    stays, dies = FakeCore(), FakeCore()
    async with running_set(stays, dies) as replicas:
        operator, sleeping = replicas.set.commands, replicas.set.sleeping
        await operator.update_weights(Path("/new"), "abort")
        begins: list[tuple[Coroutine[Any, Any, object], Callable[[FakeCore], bool]]] = [
            (operator.update_weights(Path("/newer"), "abort"), lambda core: UpdateWeights("/newer") in commands(core)),
            (operator.pause("keep"), lambda core: Pause() in commands(core)),
            (operator.resume(), lambda core: commands(core)[-1] == Resume()),
            (sleeping.sleep(1), lambda core: Sleep(1) in core.received),
        ]
        for begin, is_done in begins:
            replica = replicas.set.replicas[1]
            replica.client.fail("it was killed")
            info = await replicas.restart(replica, again := FakeCore())
            again.deaf.set()
            entering = asyncio.create_task(replicas.set.enter(replica, info))
            await asyncio.sleep(0)  # it has been told of the weights, and does not answer
            operation: asyncio.Task[object] = asyncio.create_task(begin)
            await asyncio.sleep(0)
            again.deaf.clear()
            await operation
            await entering
            assert commands(again)[0] in (UpdateWeights("/new"), UpdateWeights("/newer"))
            assert is_done(again)
            assert replica.is_ready


async def test_statistics_are_the_sums_of_all_replicas() -> None:
    cores = FakeCore(), FakeCore()
    async with running_set(*cores) as replicas:
        await asyncio.gather(*(collect(replicas.set, text_request(f"{index}")) for index in range(4)))
        assert replicas.set.stats.blocks_total == 2048
        assert replicas.set.unresponsive_seconds() < 10


async def test_a_replica_that_hangs_is_ended_only_if_another_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.client.replicas.replica._STALLED", 0.05)
    cores = FakeCore(), FakeCore()
    async with running_set(*cores) as replicas:
        first, second = replicas.set.replicas
        for core in cores:
            core.deaf.set()
        await until(lambda: not first.responds and not second.responds)
        end_stalled(replicas.set.replicas, 0.0)
        assert replicas.set.dead is None
        cores[1].deaf.clear()
        await until(lambda: second.responds)
        end_stalled(replicas.set.replicas, 1000.0)
        assert first.client.dead is None
        end_stalled(replicas.set.replicas, 0.0)
        assert "it has made no progress for" in str(first.client.dead)
        assert second.client.dead is None
