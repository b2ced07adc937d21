"""Metrics of several processes are added up as if one process had counted."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest
from prometheus_client.registry import Collector
from typing_extensions import override

from quire.metrics.merging import ProcessDump, merged


class Process:
    """Some metrics of a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("http_requests", "Requests", ("handler",), registry=self.registry)
        self.seconds = Histogram("seconds", "Times", ("model",), buckets=(1, 2), registry=self.registry)
        self.waiting = Gauge("waiting", "Requests that wait", registry=self.registry)
        self.started = Gauge("process_start_time_seconds", "Start", registry=self.registry)

    def dump(self, identity: str, *, has_ended: bool = False) -> ProcessDump:
        """What another process gets."""
        made = ProcessDump.of(identity, int(identity[0]), self.registry.collect())
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=ProcessDump)
        return msgspec.structs.replace(sent, has_ended=has_ended)


class Shown(Collector):
    """Metrics that are rendered."""

    def __init__(self, *dumps: ProcessDump) -> None:
        self._metrics = merged(dumps)

    @override
    def collect(self) -> list[Metric]:
        return self._metrics


def page(*dumps: ProcessDump) -> dict[str, str]:
    """Samples of a page, by what stands before their values."""
    text = generate_latest(Shown(*dumps), ALLOWUTF8).decode()  # type: ignore[no-untyped-call]
    samples = [line.partition(" # ") for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: line.rpartition(" ")[2] + mark + exemplar for line, mark, exemplar in samples}


def test_what_processes_have_counted_is_added_up_and_stays_when_they_have_ended() -> None:
    first, second, ended = Process(), Process(), Process()
    for process, count in ((first, 1), (second, 2), (ended, 4)):
        process.requests.labels("/a").inc(count)
        process.waiting.set(count)
        process.started.set(100 * count)
    second.requests.labels("/b").inc()
    first.seconds.labels("m").observe(0.5, {"trace_id": "early"})
    second.seconds.labels("m").observe(0.7, {"trace_id": "late"})
    second.seconds.labels("m").observe(1.5)
    samples = page(first.dump("0.2"), second.dump("1.1"), ended.dump("0.1", has_ended=True))
    assert samples['http_requests_total{handler="/a"}'] == "7.0"
    assert samples['http_requests_total{handler="/b"}'] == "1.0"
    assert samples["waiting"] == "3.0", "nothing waits in a process that has ended"
    assert samples["process_start_time_seconds"] == "100.0"
    assert samples['seconds_bucket{le="1.0",model="m"}'].startswith('2.0 # {trace_id="late"} 0.7 ')
    assert samples['seconds_bucket{le="+Inf",model="m"}'] == "3.0"
    assert samples['seconds_sum{model="m"}'] == "2.7"
    assert samples['quire:api_server_requests_total{api_server="0"}'] == "5.0"
    assert samples['quire:api_server_requests_total{api_server="1"}'] == "3.0"
