"""Batches of pooling requests: order, windows, failures and what is left of them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from quire.engine.client.deadline import Deadline
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.errors import DeadlineExceeded, EngineDead, RequestRefused
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import Abort, AddRequest, PooledArray
from quire.engine.client.records import Observer, RequestRecord
from quire.engine.client.stream import PoolRequest
from tests.support.fake_core import INFO, FakeCore, prompt_of, running_client
from tests.support.pooling import pooling_info
from tests.support.server import until


def requests(count: int) -> list[PoolRequest]:
    params = PoolingParams(task="embed")
    return [PoolRequest(prompt=prompt_of(f"request {i}"), params=params, flow="f") for i in range(count)]


def running(core: FakeCore) -> int:
    return len(core.active)


def nothing_is_held(client: EngineClient) -> bool:
    return client.slots_in_use == 0 and client.open_streams == 0


class Records(Observer):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_finish(self, record: RequestRecord) -> None:
        self.reasons.append(record.finish_reason)


async def test_results_have_the_order_of_the_requests() -> None:
    core = FakeCore()
    async with running_client(core, capacity=8) as client:
        client.observers.add(records := Records())
        pool_requests = requests(500)
        with client.slots(1), client.pool_batch() as batch:
            batch.add(pool_requests[:300])
            await asyncio.sleep(0)
            batch.add(pool_requests[300:])
            arrays = await batch.results()
        assert all(np.array_equal(array, request.prompt) for array, request in zip(arrays, pool_requests, strict=True))
        assert records.reasons == ["stop"] * 500
        assert nothing_is_held(client)


@pytest.mark.parametrize("capacity", [1, 2, 64])
async def test_a_batch_uses_half_of_the_slots_and_others_find_one(capacity: int) -> None:
    core = FakeCore()
    core.hold.set()
    async with running_client(core, capacity=capacity) as client:
        with client.slots(1), client.pool_batch() as first:
            first.add(requests(200))
            assert client.slots_in_use == max(1, capacity // 2)
            if capacity > 1:
                with client.slots(1), client.pool_batch() as second:  # of another client, at the same time
                    second.add(requests(3))
                    assert client.slots_in_use == capacity // 2 + 1
                    core.hold.clear()
                    assert len(await second.results()) == 3
            core.hold.clear()
            assert len(await first.results()) == 200
        assert nothing_is_held(client)


async def test_what_is_kept_of_a_result_is_up_to_the_caller() -> None:
    def keep(index: int, array: PooledArray) -> PooledArray:
        return np.array([index, len(array)], np.float32)

    async with running_client(FakeCore()) as client:
        with client.slots(1), client.pool_batch(on_result=keep) as batch:
            batch.add(requests(12))
            arrays = await batch.results()
    assert [array.tolist() for array in arrays[:2]] == [[0, 9], [1, 9]]
    assert arrays[-1].tolist() == [11, 10]


async def test_what_is_kept_may_take_time_and_holds_its_slot() -> None:
    done = asyncio.Event()

    async def later(index: int, array: PooledArray) -> PooledArray:
        await done.wait()
        return np.array([index], np.float32)

    async with running_client(FakeCore(), capacity=8) as client:
        client.observers.add(records := Records())
        with client.slots(1), client.pool_batch(on_result=later) as batch:
            batch.add(requests(20))
            results = asyncio.ensure_future(batch.results())
            await until(lambda: len(batch._keeping) == 4)
            await asyncio.sleep(0)
            assert (client.slots_in_use, client.open_streams, results.done()) == (4, 4, False)
            done.set()
            assert [int(array[0]) for array in await results] == list(range(20))
        assert records.reasons == ["stop"] * 20
        assert nothing_is_held(client)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_batch_that_is_left_or_fails_keeps_nothing_more(fails: bool) -> None:
    cancelled = []

    async def forever(index: int, array: PooledArray) -> PooledArray:
        if fails and index == 3:
            raise RuntimeError("no")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(index)
            raise
        return array

    async with running_client(FakeCore(), capacity=64) as client:
        with client.slots(1), client.pool_batch(on_result=forever) as batch:
            batch.add(requests(8))
            await until(lambda: len(batch._keeping) == 8 - fails)
            if fails:
                with pytest.raises(RuntimeError, match="no"):
                    await batch.results()
                assert batch.failed == 3
        await until(lambda: len(cancelled) == 8 - fails)
        assert nothing_is_held(client)


async def test_one_that_is_refused_ends_the_batch() -> None:
    core = FakeCore(info=pooling_info(INFO), refuses=lambda message: len(message.prompt) == 10)
    async with running_client(core) as client:
        with client.slots(1), client.pool_batch() as batch:
            batch.add(requests(100))
            with pytest.raises(RequestRefused, match="refused"):
                await batch.results()
            assert batch.failed == 10
            with pytest.raises(RequestRefused):
                batch.add(requests(1))
        await until(lambda: not running(core))
        assert nothing_is_held(client)


async def test_a_batch_that_is_left_is_aborted_at_once() -> None:
    core = FakeCore()
    core.hold.set()
    async with running_client(core) as client:
        client.observers.add(records := Records())

        async def wait() -> None:
            with client.slots(1), client.pool_batch() as batch:
                batch.add(requests(100))
                await batch.results()

        task = asyncio.create_task(wait())
        await until(lambda: running(core) == 32)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert nothing_is_held(client)
        await until(lambda: not running(core))
    (abort,) = (message for message in core.received if isinstance(message, Abort))
    assert len(abort.request_ids) == 32
    assert len([message for message in core.received if isinstance(message, AddRequest)]) == 32
    assert records.reasons == ["abort"] * 32


async def test_a_batch_has_a_time_limit() -> None:
    core = FakeCore()
    core.hold.set()
    async with running_client(core) as client:
        with client.slots(1), client.pool_batch(deadline=Deadline(0.02)) as batch:
            batch.add(requests(3))
            with pytest.raises(DeadlineExceeded):
                await batch.results()
        await until(lambda: not running(core))
        assert nothing_is_held(client)


async def test_a_batch_ends_with_its_engine() -> None:
    core = FakeCore(die_at_step=1)
    async with running_client(core) as client:
        with client.slots(1), client.pool_batch() as batch:
            batch.add(requests(100))
            with pytest.raises(EngineDead):
                await batch.results()
        assert nothing_is_held(client)
        with client.slots(0) if client.dead is None else pytest.raises(EngineDead), client.pool_batch():
            pass


async def test_an_empty_batch_has_no_results() -> None:
    async with running_client(FakeCore()) as client:
        with client.slots(1), client.pool_batch() as batch:
            assert await batch.results() == []
