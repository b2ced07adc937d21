"""Observers: any number of them, each of which gets the events that its class has a method for."""

from __future__ import annotations

import pytest
from typing_extensions import override

from quire.engine.client.origin import Origin
from quire.engine.client.protocol import StepStats
from quire.engine.client.records import Observer, RequestRecord
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.stream import GenerateRequest
from quire.engine.client.timeline import RequestTimes
from quire.engine.client.trace_context import TraceContext
from tests.support.fake_core import FakeCore, prompt_of, running_client
from tests.support.observers import Records
from tests.support.tokenizer import EOS

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def request(text: str = "hi", origin: Origin | None = None) -> GenerateRequest:
    params = SamplingParams(max_tokens=50, eos_token_ids=(EOS,))
    return GenerateRequest(prompt=prompt_of(text), params=params, origin=origin or Origin())


class Broken(Observer):
    """Fail at everything that happens to a request."""

    @override
    def on_step(self, stats: StepStats) -> None:
        raise ValueError("on_step")

    @override
    def on_tokens(self, origin: Origin, times: RequestTimes, now: float, count: int) -> None:
        raise ValueError("on_tokens")

    @override
    def on_finish(self, record: RequestRecord) -> None:
        raise ValueError("on_finish")


class Tokens(Observer):
    """Count tokens."""

    count = 0

    @override
    def on_tokens(self, origin: Origin, times: RequestTimes, now: float, count: int) -> None:
        self.count += count


async def test_an_observer_that_fails_takes_nothing_from_requests_and_other_observers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_client(FakeCore()) as client:
        tokens, records = Tokens(), Records()
        for observer in (Broken(), tokens, records):
            client.observers.add(observer)
        deltas = [delta async for delta in client.generate(request("abc"))]
        assert "".join(delta.text for delta in deltas) == "ABC"
        assert tokens.count == 4
        assert [record.output_tokens for record in records.records] == [4]
    failures = {str(entry.exc_info[1]) for entry in caplog.records if entry.exc_info}
    assert failures == {"on_step", "on_tokens", "on_finish"}


async def test_a_record_has_its_ids_and_the_times_of_all_borders() -> None:
    origin = Origin("request", TraceContext.parse(PARENT), 1.0)
    async with running_client(FakeCore()) as client:
        client.observers.add(records := Records())
        async for _ in client.generate(request(origin=origin)):
            pass
        async for _ in client.generate(request()):
            pass
    first, second = records.records
    assert first.origin is origin
    assert second.origin == Origin()
    assert first.request_id != second.request_id
    times = first.times
    borders = [times.rendered, times.queued, times.scheduled, times.first_token, times.last_token, times.sent]
    assert times.arrived == 1.0
    assert borders == sorted(borders)
    assert borders[0] > 0.0


async def test_the_origin_knows_where_the_time_of_its_sequences_went() -> None:
    origin = Origin("request", arrived=1.0)
    async with running_client(FakeCore()) as client:
        client.observers.add(tokens := Tokens())
        for text in ("abc", "de"):
            assert [delta async for delta in client.generate(request(text, origin))][-1].finish_reason == "stop"
    timeline = origin.timeline
    assert 1.0 < timeline.queued <= timeline.scheduled <= timeline.first_token < timeline.last_token <= timeline.sent
    assert (timeline.prompt_tokens, timeline.output_tokens, tokens.count) == (5, 7, 7)
