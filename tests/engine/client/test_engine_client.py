"""EngineClient: complete streams, aborts, capacity, health checks and the end of the engine."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from quire.engine.client import engine_client as client_module
from quire.engine.client.deadline import Deadline
from quire.engine.client.detokenizer import Detokenizer
from quire.engine.client.errors import (
    DeadlineExceeded,
    EngineAsleep,
    EngineDead,
    EngineOverloaded,
    RequestFailed,
    RequestRefused,
)
from quire.engine.client.launch import ThreadCore
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import Abort, AddRequest, ErrorOutput, StepStats, TokenLogprobs, TokensOutput
from quire.engine.client.records import Observer, RequestRecord
from quire.engine.client.stream import PooledStream, PoolRequest, SequenceStream
from tests.support.fake_core import FakeCore, prompt_of, running_client, says
from tests.support.iterations import Iterations
from tests.support.server import until
from tests.support.text_requests import collect, text_request
from tests.support.tokenizer import byte_tokenizer

_LONG = 3600.0  # seconds, longer than any test


async def test_concurrent_streams_are_complete() -> None:
    async with running_client(FakeCore()) as client:
        texts = [f"request {i} \u20ac" for i in range(30)]
        results = await asyncio.gather(*(collect(client, text_request(text)) for text in texts))
        assert [text for text, _ in results] == [text.upper() for text in texts]
        assert all(last.finish_reason == "stop" for _, last in results)
        assert client.open_streams == 0


async def test_steps_that_were_not_read_are_merged_into_one_delta() -> None:
    request = text_request()
    stream = SequenceStream(request, Detokenizer(byte_tokenizer(), [], request.text))
    ids = byte_tokenizer().encode("HELLO").ids
    for token in ids[:-1]:
        stream.put(TokensOutput("id", [token]))
    stream.put(TokensOutput("id", ids[-1:], "length"))
    delta = await stream.next()
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("HELLO", ids, "length")


@pytest.mark.parametrize(
    ("text_params", "reason", "expected"),
    [
        ({}, "stop", "HI"),
        ({"include_stop": True}, "stop", "HI!"),
        ({}, "length", "HI!"),
        ({"stop": ("!",)}, "stop", "HI"),
    ],
)
async def test_a_stop_token_has_text_only_with_include_stop(
    text_params: dict[str, Any], reason: Any, expected: str
) -> None:
    request = text_request(**text_params)
    stream = SequenceStream(request, Detokenizer(byte_tokenizer(), [], request.text))
    ids = byte_tokenizer().encode("HI!").ids
    entries = [TokenLogprobs([token], [-1.0], [1]) for token in ids]
    stream.put(TokensOutput("id", ids[:1], logprobs=entries[:1]))
    stream.put(TokensOutput("id", ids[1:], reason, logprobs=entries[1:]))
    delta = await stream.next()
    assert (delta.text, delta.token_ids, delta.logprobs, delta.finish_reason) == (expected, ids, entries, reason)
    assert stream.output_tokens == 3


async def test_eos_has_text_only_with_special_tokens_and_include_stop() -> None:
    core = FakeCore()
    async with running_client(core) as client:
        assert (await collect(client, text_request(skip_special_tokens=False)))[0] == "HELLO"
        expected, _ = await collect(client, text_request(skip_special_tokens=False, include_stop=True))
        assert expected == "HELLO<|im_end|>"


async def test_an_output_that_cannot_be_handled_fails_only_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    core = FakeCore(answer=says("x" * 1000))
    core.hold.set()
    async with running_client(core) as client:
        first = asyncio.create_task(collect(client, text_request(max_tokens=5)))
        await until(lambda: len(core.active) == 1)
        second = asyncio.create_task(collect(client, text_request(max_tokens=1000)))
        await until(lambda: len(core.active) == 2)

        def fail(_: TokensOutput) -> None:
            raise OverflowError("injected error")

        monkeypatch.setattr(list(client._streams.values())[1], "put", fail)
        core.allow(1)
        with pytest.raises(RequestFailed, match="injected error"):
            await second
        await until(lambda: len(core.active) == 1)
        core.hold.clear()
        assert (await first)[0] == "xxxxx"


async def test_an_observer_that_fails_does_not_stop_the_streams() -> None:
    class FailingObserver(Observer):
        def on_step(self, stats: StepStats) -> None:
            raise ZeroDivisionError

    async with running_client(FakeCore()) as client:
        client.observers.add(FailingObserver())
        assert (await collect(client, text_request()))[0] == "HELLO"


async def test_closing_a_stream_frees_its_request() -> None:
    core = FakeCore(answer=says("x" * 1000))
    core.hold.set()
    core.allow(1)
    async with running_client(core) as client:
        async with aclosing(client.generate(text_request(max_tokens=1000))) as deltas:
            await anext(deltas)
        await until(lambda: not core.active)
        assert any(isinstance(message, Abort) for message in core.received)
        assert client.open_streams == 0


async def test_cancelling_before_the_first_token_frees_the_request() -> None:
    core = FakeCore()
    core.hold.set()
    async with running_client(core) as client:
        task = asyncio.create_task(collect(client, text_request()))
        await until(lambda: core.active)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not core.active)
        assert client.open_streams == 0


async def test_a_stop_string_ends_the_request_in_the_core() -> None:
    core = FakeCore(answer=says("one two three" + "x" * 1000))
    core.hold.set()
    core.allow(len("one two thr"))
    async with running_client(core) as client:
        text, last = await collect(client, text_request(max_tokens=2000, stop=(" thr",)))
        assert (text, last.finish_reason, last.stop_reason) == ("one two", "stop", " thr")
        await until(lambda: not core.active)


async def test_a_finished_request_is_not_aborted() -> None:
    core = FakeCore()
    async with running_client(core) as client:
        await collect(client, text_request())
        await collect(client, text_request())
        assert not any(isinstance(message, Abort) for message in core.received)


async def test_requests_beyond_the_capacity_are_rejected() -> None:
    core = FakeCore()
    core.hold.set()
    async with running_client(core, capacity=2) as client:
        with client.slots(2):
            tasks = [asyncio.create_task(collect(client, text_request())) for _ in range(2)]
            await until(lambda: len(core.active) == 2)
            with pytest.raises(EngineOverloaded) as refused, client.slots(1):
                pass
            assert refused.value.retry_after >= 1
            assert "2 of at most 2 sequences" in str(refused.value)
            assert "this request needs 1" in str(refused.value)
            core.hold.clear()
            assert [text for text, _ in await asyncio.gather(*tasks)] == ["HELLO", "HELLO"]
        assert client.slots_in_use == 0
        with client.slots(2):
            assert (await collect(client, text_request()))[0] == "HELLO"


async def test_slots_come_back_after_an_exception() -> None:
    async with running_client(FakeCore(), capacity=2) as client:
        with pytest.raises(ZeroDivisionError), client.slots(2):
            raise ZeroDivisionError
        assert client.slots_in_use == 0


async def test_death_of_the_core_fails_all_streams_and_new_requests() -> None:
    core = FakeCore(die_at_step=3)
    async with running_client(core) as client:
        results = await asyncio.gather(*(collect(client, text_request()) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(result, EngineDead) for result in results)
        assert client.dead is not None
        assert "told to die" in str(client.dead)
        with pytest.raises(EngineDead):
            await collect(client, text_request())


async def test_a_request_to_a_core_that_has_ended_fails() -> None:
    """The core has ended, but its last message has not been read yet."""
    core, handle = FakeCore(die_at_step=1), ThreadCore()
    async with running_client(core, handle=handle) as client:
        with pytest.raises(EngineDead):
            await collect(client, text_request())
        await handle.join(60)
        await asyncio.sleep(0.1)  # until its socket is closed
        client._dead = None
        async with asyncio.timeout(60):
            with pytest.raises(EngineDead):
                await collect(client, text_request())
        client.fail("it is gone")


async def test_a_core_that_does_not_answer_pings_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_PING_EVERY", 0.01)
    core = FakeCore()
    async with running_client(core) as client:
        received = client._heartbeat.last_message
        await until(lambda: client._heartbeat.last_message > received)  # pings are answered
        await until(lambda: client.unresponsive_seconds() < 0.1)
        core.deaf.set()
        await until(lambda: client.unresponsive_seconds() > 0.2)
        core.deaf.clear()
        await until(lambda: client.unresponsive_seconds() < 0.1)


async def test_the_observer_sees_every_finished_request() -> None:
    class RecordingObserver(Observer):
        def __init__(self) -> None:
            self.records: list[RequestRecord] = []

        def on_finish(self, record: RequestRecord) -> None:
            self.records.append(record)

    core = FakeCore()
    async with running_client(core) as client:
        client.observers.add(observer := RecordingObserver())
        await collect(client, text_request("hello"))
        await collect(client, text_request("hello", max_tokens=2))
        core.hold.set()
        task = asyncio.create_task(collect(client, text_request("hello")))
        await until(lambda: core.active)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        reasons = [record.finish_reason for record in observer.records]
        assert reasons == ["stop", "length", "abort"]
        first = observer.records[0]
        assert (first.prompt_tokens, first.output_tokens, first.max_tokens) == (5, 6, 100)
        times = first.times
        assert 0.0 < times.rendered <= times.queued <= times.scheduled
        assert times.scheduled <= times.first_token <= times.last_token <= times.sent


async def test_request_ids_are_unique() -> None:
    core = FakeCore()
    async with running_client(core) as client:
        await asyncio.gather(*(collect(client, text_request()) for _ in range(20)))
    ids = [message.request_id for message in core.received if isinstance(message, AddRequest)]
    assert len(set(ids)) == 20


def pooling(text: str = "hello", **fields: Any) -> PoolRequest:
    return PoolRequest(prompt=prompt_of(text), params=PoolingParams(task="embed"), **fields)


async def test_pooled_arrays_arrive_beside_generated_text() -> None:
    finished: list[RequestRecord] = []

    class Records(Observer):
        def on_finish(self, record: RequestRecord) -> None:
            finished.append(record)

    async with running_client(FakeCore()) as client:
        client.observers.add(Records())
        pooled, (text, _) = await asyncio.gather(client.pool(pooling("abc")), collect(client, text_request()))
        assert pooled.data.dtype == np.float32
        assert pooled.data.tolist() == prompt_of("abc").tolist()
        assert text == "HELLO"
        assert client.open_streams == 0
    assert sorted((record.kind, record.finish_reason, record.prompt_tokens) for record in finished) == [
        ("generate", "stop", 5),
        ("pool", "stop", 3),
    ]


async def test_cancelled_pooling_is_aborted() -> None:
    core = FakeCore()
    core.hold.set()
    async with running_client(core) as client:
        task = asyncio.create_task(client.pool(pooling()))
        await until(lambda: len(core.active) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: any(isinstance(message, Abort) for message in core.received))
        assert not core.active


async def test_pooling_fails_with_its_engine_and_after_its_timeout() -> None:
    core = FakeCore(die_at_step=1)
    async with running_client(core) as client:
        with pytest.raises(EngineDead, match="told to die"):
            await client.pool(pooling())
    slow = FakeCore()
    slow.hold.set()
    async with running_client(slow) as client:
        with pytest.raises(DeadlineExceeded):
            await client.pool(pooling(deadline=Deadline(0.01)))


async def test_an_output_of_another_task_fails_the_request() -> None:
    stream = PooledStream(pooling())
    stream.put(TokensOutput("id", [1]))
    with pytest.raises(RequestFailed, match="TokensOutput instead of PooledOutput"):
        await stream.result()


async def test_refusals_and_failures_are_different_errors() -> None:
    request = text_request()
    for output, expected in (
        (ErrorOutput("id", "too long", invalid=True), RequestRefused),
        (ErrorOutput("id", "broken"), RequestFailed),
    ):
        generating = SequenceStream(request, Detokenizer(byte_tokenizer(), [], request.text))
        pooled = PooledStream(pooling())
        for stream in (generating, pooled):
            stream.put(output)
            assert stream.finished_by_core
        with pytest.raises(expected, match=output.error):
            await generating.next()
        with pytest.raises(expected, match=output.error):
            await pooled.result()


@pytest.mark.parametrize("cause", ["deadline", "death", "sleep"])
async def test_requests_that_end_together_do_not_hold_up_the_event_loop(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = FakeCore()
    core.hold.set()
    count = 200
    async with running_client(core, capacity=count) as client:
        with Iterations() as iterations:

            async def run() -> None:
                with pytest.raises((DeadlineExceeded, EngineDead, EngineAsleep)):
                    await collect(client, structs.replace(text_request(), deadline=deadline))
                iterations.note()

            deadline = Deadline(_LONG if cause == "deadline" else None)
            tasks = [asyncio.create_task(run()) for _ in range(count)]
            await until(lambda: client.open_streams == count)
            if cause == "deadline":
                loop, time_of = asyncio.get_running_loop(), time.monotonic
                monkeypatch.setattr(loop, "time", lambda: time_of() + _LONG)  # all deadlines pass in one iteration
            elif cause == "death":
                client.fail("it was killed")
            else:
                client.end_all(EngineAsleep("it falls asleep"))
            await asyncio.gather(*tasks)
        assert (iterations.total, iterations.most) == (count, 1)
        if cause != "death":
            await until(lambda: not core.active)
        assert client.open_streams == 0
