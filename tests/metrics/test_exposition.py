"""/metrics in Prometheus' text and in OpenMetrics: for parsers, compressed, and for many scrapes at once."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.samples import Exemplar

from quire.metrics.exposition import OPENMETRICS, PLAIN, Format, format_for
from quire.metrics.prometheus import Metrics
from tests.support.fake_core import FakeCore
from tests.support.scrapes import scrape, values
from tests.support.server import Server, running_server

TRACE = "0af7651916cd43dd8448eb211c80319c"
# What Prometheus 2.53 and 3.5 send.
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
BODY = {"prompt": "abcd", "max_tokens": 3}


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", PLAIN),
        ("*/*", PLAIN),
        ("text/html", PLAIN),
        ("text/plain;version=0.0.4", PLAIN),
        ("application/openmetrics-text", OPENMETRICS),
        (PROMETHEUS_2, OPENMETRICS),
        (PROMETHEUS_3, OPENMETRICS),
        ("Application/OpenMetrics-Text; Version=1.0.0", OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1", PLAIN),
        ("application/openmetrics-text;q=0.1,text/plain;q=0.9", PLAIN),
        ("application/openmetrics-text;q=0", PLAIN),
        ("application/openmetrics-text;q=x;version=", PLAIN),
        (";;,,;q=;version=9.9.9.9,=", PLAIN),
    ],
)
def test_the_accept_header_chooses_the_format(accept: str, expected: Format) -> None:
    assert format_for(accept) is expected


async def test_both_formats_have_the_same_numbers(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore(), FakeCore(), vllm_metric_names=True) as server:
        await server.post("/v1/completions", BODY)
        answer = await server.http.get("/metrics", headers={"accept": PROMETHEUS_3})
        assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert answer.text.endswith("# EOF\n")
        assert answer.text.count("# EOF") == 1
        text, openmetrics = values(await scrape(server)), values(await scrape(server, PROMETHEUS_3))
    names = {name for name in text if not name.startswith("process_")}
    assert names == {name for name in openmetrics if not name.startswith("process_")}
    assert {name: text[name] for name in names} == {name: openmetrics[name] for name in names}
    for prefix in ("quire", "vllm"):
        assert text[f'{prefix}:generation_tokens_total{{engine="0",model_name="fake"}}'] == 3
        assert text[f'{prefix}:generation_tokens_total{{engine="1",model_name="fake-1"}}'] == 0


async def exemplars_of(server: Server, traceparent: str) -> dict[str, Exemplar]:
    """Exemplars by the names of samples, after a request with this header."""
    assert (await server.post("/v1/completions", BODY, headers={"traceparent": traceparent})).status_code == 200
    metrics = await scrape(server, PROMETHEUS_3)
    return {sample.name: sample.exemplar for metric in metrics for sample in metric.samples if sample.exemplar}


async def test_latencies_of_traced_requests_have_exemplars(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for other in (f"00-{TRACE}-b7ad6b7169203331-00", "nonsense", f"00-{'0' * 32}-b7ad6b7169203331-01"):
            assert not await exemplars_of(server, other)
        exemplars = await exemplars_of(server, f"00-{TRACE}-b7ad6b7169203331-01")
        assert {exemplar.labels["trace_id"] for exemplar in exemplars.values()} == {TRACE}
        latencies = ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time")
        expected = {f"{prefix}:{name}_seconds_bucket" for name in latencies for prefix in ("quire", "vllm")}
        assert expected | {"http_request_duration_seconds_bucket"} <= exemplars.keys()
        assert TRACE not in (await server.http.get("/metrics")).text


async def test_the_body_is_compressed_if_that_is_accepted(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        plain = await server.http.get("/metrics", headers={"accept-encoding": "identity;q=1, gzip;q=0"})
        assert "content-encoding" not in plain.headers
        request = server.http.build_request("GET", "/metrics", headers={"accept-encoding": "br, gzip"})
        answer = await server.http.send(request, stream=True)
        compressed = b"".join([piece async for piece in answer.aiter_raw()])
        await answer.aclose()
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["vary"] == "accept, accept-encoding"
    assert len(compressed) < len(plain.content) / 5
    assert b"quire:num_requests_running" in gzip.decompress(compressed)


async def test_scrapes_that_come_together_share_a_rendering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderings, collect = 0, Metrics.collect

    def counting(self: Metrics) -> Iterator[Metric]:
        nonlocal renderings
        renderings += 1
        return collect(self)

    monkeypatch.setattr(Metrics, "collect", counting)
    async with running_server(tmp_path) as server:
        answers = await asyncio.gather(*(server.http.get("/metrics") for _ in range(40)))
        assert all("quire:num_requests_running" in answer.text for answer in answers)
        assert renderings < 20
        await server.post("/v1/completions", BODY)
        latest = values(await scrape(server))
    assert latest['quire:generation_tokens_total{engine="0",model_name="fake"}'] == 3
