"""Answers say in the header Server-Timing where their time went."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.app.server_timing import server_timing
from quire.engine.client.origin import Origin
from quire.engine.client.timeline import RequestTimes
from tests.support.fake_core import INFO, FakeCore
from tests.support.pooling import pooling_info
from tests.support.server import running_server

PHASES = ("preprocess", "queue", "prefill", "decode")
MESSAGES = [{"role": "user", "content": "Once"}]


def timings(answer: httpx.Response) -> dict[str, float]:
    """Milliseconds by name."""
    metrics = re.findall(r'(\w+);dur=([\d.]+)(?:;desc="[^"]*")?(?:, |$)', answer.headers["server-timing"])
    return {name: float(milliseconds) for name, milliseconds in metrics}


def descriptions(answer: httpx.Response) -> dict[str, str]:
    return dict(re.findall(r'(\w+);dur=[\d.]+;desc="([^"]*)"', answer.headers["server-timing"]))


def test_sequences_count_from_the_earliest_start_to_the_latest_end() -> None:
    origin = Origin(arrived=10.0)
    for times in (
        RequestTimes(10.0, 10.1, 10.2, 10.5, 11.0, 12.0, 12.1),
        RequestTimes(10.0, 10.1, 10.2, 10.4, 11.5, 13.0, 13.1),
        RequestTimes(10.0, 10.1, 10.3),  # it was refused
    ):
        origin.timeline.add_times(times)
    origin.timeline.add_tokens(8, 4, 5)
    origin.timeline.add_tokens(8, 8, 6)
    assert server_timing(origin, 13.25).split(", ", 3) == [
        "total;dur=3250.0",
        "preprocess;dur=200.0",
        "queue;dur=200.0",
        'prefill;dur=600.0;desc="prefill: 16 tokens, 12 cached", decode;dur=2000.0;desc="decode: 11 tokens"',
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/completions", {"prompt": ["ab", "cd"], "n": 2}, marks=pytest.mark.slow),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "Once"}),
        pytest.param("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}, marks=pytest.mark.slow),
    ],
)
async def test_the_phases_of_an_answer_are_all_of_its_time(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        answer = await server.post(path, body)
    assert answer.status_code == 200
    measured = timings(answer)
    assert set(PHASES) < set(measured)
    assert sum(measured[name] for name in PHASES) <= measured["total"] + 1
    assert measured["tokenize"] <= measured["preprocess"]
    assert re.fullmatch(r"prefill: [1-9]\d* tokens, \d+ cached", descriptions(answer)["prefill"])
    assert re.fullmatch(r"decode: [1-9]\d* tokens", descriptions(answer)["decode"])


async def test_what_has_no_tokens_has_what_applies(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(), FakeCore(info=pooling_info(INFO))) as server:
        embedded = await server.post("/v1/embeddings", {"input": ["a", "b"]})
        assert (embedded.status_code, "decode" in timings(embedded)) == (200, False)
        assert descriptions(embedded)["inference"].startswith("inference: 2 tokens")
        streamed = await server.post("/v1/completions", {"prompt": "a", "stream": True})
        assert list(timings(streamed)) == ["total", "preprocess", "tokenize"]
        for path, status in (("/v1/models", 200), ("/v1/models/none", 404), ("/nowhere", 404)):
            answer = await server.http.get(path)
            assert (answer.status_code, list(timings(answer))) == (status, ["total"])
        assert (await server.post("/v1/completions", {"prompt": 1.5})).headers["server-timing"].startswith("total;dur=")
        for path in ("/health", "/ready", "/metrics"):
            assert "server-timing" not in (await server.http.get(path)).headers


async def test_pages_of_allowed_origins_may_read_it(tmp_path: Path) -> None:
    async with running_server(tmp_path, allowed_origins=("http://a.example",)) as server:
        for origin, allowed in (("http://a.example", True), ("http://b.example", False)):
            answer = await server.http.get("/v1/models", headers={"origin": origin})
            assert answer.headers.get("timing-allow-origin") == (origin if allowed else None)
            assert "server-timing" in answer.headers["access-control-expose-headers"].split(", ") or not allowed
    async with running_server(tmp_path, allowed_origins=("*",)) as server:
        answer = await server.http.get("/v1/models", headers={"origin": "http://b.example"})
        assert answer.headers["timing-allow-origin"] == "http://b.example"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_an_operator_has_timings_in_all_bodies(tmp_path: Path, streamed: bool) -> None:
    async with running_server(tmp_path, enable_per_request_metrics=True) as server:
        for path, body in (
            ("/v1/completions", {"prompt": "ab"}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/responses", {"input": "Once"}),
            ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
        ):
            options = {"stream_options": {"include_usage": True}} if "completions" in path and streamed else {}
            answer = await server.post(path, {**body, "stream": streamed, **options})
            assert answer.text.count('"preprocess_time_ms":') == 1, path
            assert answer.text.count('"generation_time_ms":') == 1, path
        plain = await server.post("/v1/completions", {"prompt": "ab", "stream": True})
        assert "metrics" not in plain.text  # no client expects a chunk without choices
        refused = await server.post("/v1/completions", {"prompt": "ab", "return_metrics": False})
        assert refused.json()["metrics"] is None


async def test_a_response_has_timings_on_request(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        asked = (await server.post("/v1/responses", {"input": "Once", "return_metrics": True})).json()
        assert asked["metrics"]["time_to_first_token_ms"] >= asked["metrics"]["queue_time_ms"]
        assert "metrics" not in (await server.post("/v1/responses", {"input": "Once"})).json()
