"""Load balancers read the load from a response header."""

from __future__ import annotations

import json
from pathlib import Path

from quire.app.middleware import load_of
from quire.engine.client.protocol import StepStats
from tests.support.fake_core import FakeCore
from tests.support.server import running_server


async def test_the_load_is_in_a_header_if_a_request_asks_for_it(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(), FakeCore()) as server:
        body = {"prompt": "hi", "max_tokens": 1}

        async def header(load_format: str, **fields: bool) -> str | None:
            answer = await server.post(
                "/v1/completions", {**body, **fields}, headers={"endpoint-load-metrics-format": load_format}
            )
            assert answer.status_code == 200
            value: str | None = answer.headers.get("endpoint-load-metrics")
            return value

        as_text = await header("text")
        assert as_text is not None
        kind, usage, waiting = as_text.replace(",", "").split()
        assert (kind, waiting) == ("TEXT", "named_metrics.num_requests_waiting=0")
        assert usage.startswith("named_metrics.kv_cache_usage_perc=0")
        as_json = await header("JSON", stream=True)
        assert as_json is not None
        assert json.loads(as_json.removeprefix("JSON "))["named_metrics"].keys() == {
            "kv_cache_usage_perc",
            "num_requests_waiting",
        }
        assert await header("BIN") is None


def test_the_load_is_that_of_all_models() -> None:
    stats = [StepStats(waiting=2, blocks_used=10, blocks_total=100), StepStats(waiting=1, blocks_total=300)]
    assert load_of(stats) == {"kv_cache_usage_perc": 0.025, "num_requests_waiting": 3}
    assert load_of([StepStats()]) == {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0}
