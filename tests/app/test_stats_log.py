"""A line in the log says what an engine does, while it works."""

from __future__ import annotations

import asyncio
import logging

import pytest

from quire.app.stats_log import StatsLog
from quire.engine.client.origin import Origin
from quire.engine.client.protocol import StepStats
from quire.engine.client.timeline import RequestTimes
from tests.support.fake_core import FakeCore, running_client


async def test_an_engine_that_works_is_described(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.stats")
    async with running_client(FakeCore()) as client:
        log = StatsLog("tiny", client)
        log.write()
        assert not caplog.records  # it has done nothing
        stats = StepStats(step_tokens=110, prefix_queries=200, prefix_hits=50, drafted_tokens=8, accepted_tokens=6)
        client.observers.on_step(stats)
        client.observers.on_tokens(Origin(), RequestTimes(), 0.0, 10)
        log.write()
        (record,) = caplog.records
        fields = record.__dict__["fields"]
        assert fields["prompt_tokens_per_second"] == pytest.approx(10 * fields["generation_tokens_per_second"], rel=0.1)
        assert (fields["prefix_cache_hit_percent"], fields["draft_acceptance_percent"]) == (25.0, 75.0)
        words = record.getMessage().replace(str(fields["prompt_tokens_per_second"]), "N", 1)
        assert words.startswith("tiny: Avg prompt throughput: N tokens/s, Avg generation throughput: ")
        assert "Running: 0 reqs, Waiting: 0 reqs, KV cache usage: 0.0%, Prefix cache hit rate: 25.0%" in words
        log.write()
        assert len(caplog.records) == 1


async def test_it_is_written_until_it_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.stats")
    async with running_client(FakeCore()) as client:
        log = StatsLog("tiny", client)
        writing = asyncio.create_task(log.write_regularly(0.001))
        for count in (1, 2):
            client.observers.on_step(StepStats(step_tokens=1))
            while len(caplog.records) < count:
                await asyncio.sleep(0.001)
        writing.cancel()
