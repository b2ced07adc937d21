"""Metrics of several processes of a server as those of one: added up.

Gauges of the engine are in each process, and are taken from the one that answers. What a process has counted before it
ended is kept: else the sums would fall, as if the server had started again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Self

import msgspec
from prometheus_client import Metric
from prometheus_client.samples import Exemplar, Sample, Timestamp

_FIRST = ("process_start_time_seconds",)
_LARGEST = ("process_max_fds", "quire:engine_restarts")  # all processes see the same restarts
_COUNTED = ("counter", "histogram")  # types of metrics that stay when their process has ended
_SERVED = "quire:api_server_requests"
_Key = tuple[str, tuple[tuple[str, str], ...]]


class SampleDump(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sample. `exemplar`: its labels, value and time; None: it has none."""

    name: str
    labels: dict[str, str]
    value: float
    exemplar: tuple[dict[str, str], float, float | None] | None = None


class MetricDump(msgspec.Struct, frozen=True, array_like=True):
    """A metric with all its samples."""

    name: str
    documentation: str
    kind: str
    unit: str
    samples: list[SampleDump]


class ProcessDump(msgspec.Struct, frozen=True, array_like=True):
    """The metrics of a process.

    Attributes:
        identity: of the process.
        number: of the process in the labels of metrics.
        has_ended: only what it has counted still counts.
    """

    identity: str
    number: int
    metrics: list[MetricDump]
    has_ended: bool = False

    @classmethod
    def of(cls, identity: str, number: int, metrics: Iterable[Metric]) -> Self:
        """Return the dump of a process from its metrics."""
        return cls(identity, number, [_dump(metric) for metric in metrics])


def _dump(metric: Metric) -> MetricDump:
    samples = [
        SampleDump(sample.name, sample.labels, sample.value, _dumped_exemplar(sample.exemplar))
        for sample in metric.samples
    ]
    return MetricDump(metric.name, metric.documentation, metric.type, metric.unit, samples)


def _dumped_exemplar(exemplar: Exemplar | None) -> tuple[dict[str, str], float, float | None] | None:
    if exemplar is None:
        return None
    at = exemplar.timestamp
    return exemplar.labels, exemplar.value, None if at is None else float(at)


def merged(dumps: Sequence[ProcessDump]) -> list[Metric]:
    """Return the metrics of some processes, and how many requests each of them has answered."""
    families: dict[str, _Family] = {}
    for dump in dumps:
        for metric in dump.metrics:
            if metric.kind in _COUNTED or not dump.has_ended:
                families.setdefault(metric.name, _Family(metric)).add(metric)
    return [*(family.metric() for family in families.values()), _answered(dumps)]


class _Family:
    """A metric of all processes."""

    def __init__(self, described: MetricDump) -> None:
        self._described = described
        self._values: dict[_Key, float] = {}
        self._exemplars: dict[_Key, tuple[dict[str, str], float, float | None]] = {}
        self._combine = _combination(described)

    def add(self, metric: MetricDump) -> None:
        """Add what a process has."""
        for sample in metric.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            combine = min if sample.name.endswith("_created") else self._combine
            before = self._values.get(key)
            self._values[key] = sample.value if before is None else combine(before, sample.value)
            if sample.exemplar is not None:
                latest = self._exemplars.get(key)
                if latest is None or (latest[2] or 0.0) <= (sample.exemplar[2] or 0.0):
                    self._exemplars[key] = sample.exemplar

    def metric(self) -> Metric:
        """The metric as the client library has it."""
        described = self._described
        made = Metric(described.name, described.documentation, described.kind, described.unit)
        for key, value in self._values.items():
            labels, number, at = self._exemplars.get(key, (None, 0.0, None))
            exemplar = None if labels is None else Exemplar(labels, number, None if at is None else _timestamp(at))
            made.samples.append(Sample(key[0], dict(key[1]), value, None, exemplar))
        return made


def _combination(metric: MetricDump) -> Callable[[float, float], float]:
    if metric.name in _FIRST:
        return min
    if metric.name in _LARGEST or metric.name.endswith("_info"):
        return max
    return lambda first, second: first + second


def _timestamp(seconds: float) -> Timestamp:
    return Timestamp(int(seconds), int(seconds % 1 * 1e9))


def _answered(dumps: Sequence[ProcessDump]) -> Metric:
    """How many requests each process has answered, by its number."""
    counts: dict[int, float] = {}
    for dump in dumps:
        counts[dump.number] = counts.get(dump.number, 0.0) + sum(
            sample.value
            for metric in dump.metrics
            if metric.name == "http_requests"
            for sample in metric.samples
            if sample.name.endswith("_total")
        )
    metric = Metric(_SERVED, "HTTP requests by the process that has answered them (--api-server-count)", "counter")
    for number, count in sorted(counts.items()):
        metric.add_sample(f"{_SERVED}_total", {"api_server": str(number)}, count)
    return metric
