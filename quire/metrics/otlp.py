"""Sends metrics to an OpenTelemetry collector over OTLP. Imported only if that is asked for."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import prometheus_client
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from quire import __version__
from quire.metrics.gen_ai import GenAiInstruments
from quire.otlp.service import service_of
from quire.otlp.settings import Collector, MetricSettings, OtlpSettingsError

logger = logging.getLogger(__name__)
_SCOPE, _GEN_AI_SCOPE = "quire.metrics", "quire.gen_ai"  # of two equal ones the exporters send the last alone
_CUMULATIVE = AggregationTemporality.CUMULATIVE
_END_TIMEOUT = 1.0  # seconds that the last export may take, while the server stops
Collect = Callable[[], Iterable[prometheus_client.Metric]]


class OtlpExport:
    """A thread that sends all metrics at an interval.

    It holds one message at a time. Numbers are cumulative: what a collector does not take is in the next message, and
    nothing is kept for one that is down.

    Attributes:
        gen_ai: records metrics that are sent only here.
    """

    def __init__(self, collect: Collect, settings: MetricSettings) -> None:
        """Prepare the export.

        Args:
            collect: gives all metrics of Prometheus; it is called in the thread.
            settings: where they are sent to, and how often.

        Raises:
            OtlpSettingsError: a variable of OpenTelemetry's SDK is not valid.
        """
        self._collect = collect
        self._settings = settings
        self._exporter = _exporter(settings.collector)
        self._resource = service_of(settings.instance)
        self._reader = InMemoryMetricReader()
        provider = MeterProvider([self._reader], self._resource, shutdown_on_exit=False)
        self.gen_ai = GenAiInstruments(provider.get_meter(_GEN_AI_SCOPE, __version__))
        self._started = time.time_ns()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-otlp-metrics", daemon=True)

    def start(self) -> None:
        """Begin to send metrics."""
        self._thread.start()

    async def close(self) -> None:
        """Send the metrics once more, and end; a collector that does not answer is not waited for."""
        self._ended.set()
        await asyncio.to_thread(self._thread.join, _END_TIMEOUT)
        await asyncio.to_thread(self._exporter.shutdown, timeout_millis=1)

    def _run(self) -> None:
        while not self._ended.wait(self._settings.interval):
            self._export(self._settings.timeout)
        self._export(_END_TIMEOUT)

    def _export(self, timeout: float) -> None:
        try:
            self._exporter.export(self._message(), timeout_millis=1e3 * timeout)
        except Exception:  # the edge of the thread; the exporter itself logs why a collector takes nothing
            logger.exception("metrics could not be sent over OTLP")

    def _message(self) -> MetricsData:
        recorded = self._reader.get_metrics_data()
        scopes = (
            [] if recorded is None else [scope for part in recorded.resource_metrics for scope in part.scope_metrics]
        )
        metrics = list(converted(self._collect(), self._started, time.time_ns()))
        scopes.append(ScopeMetrics(InstrumentationScope(_SCOPE, __version__), metrics, ""))
        return MetricsData([ResourceMetrics(self._resource, scopes, "")])


def converted(metrics: Iterable[prometheus_client.Metric], started: int, now: int) -> Iterator[Metric]:
    """Return Prometheus' metrics as those of OpenTelemetry, under the names that they have at /metrics.

    Args:
        metrics: the metrics.
        started: when counting began, in nanoseconds of Unix time.
        now: the time of their values, likewise.
    """
    for metric in metrics:
        unit = "s" if metric.name.endswith("_seconds") else ""
        match metric.type:
            case "counter":
                points = _numbers(metric, f"{metric.name}_total", started, now)
                data: Sum | Gauge | Histogram = Sum(points, _CUMULATIVE, is_monotonic=True)
                yield Metric(f"{metric.name}_total", metric.documentation, unit, data)
            case "histogram":
                data = Histogram(list(_distributions(metric, started, now)), _CUMULATIVE)
                yield Metric(metric.name, metric.documentation, unit, data)
            case _:
                data = Gauge(_numbers(metric, metric.name, 0, now))
                yield Metric(metric.name, metric.documentation, unit, data)


def _numbers(metric: prometheus_client.Metric, name: str, started: int, now: int) -> list[NumberDataPoint]:
    return [
        NumberDataPoint(sample.labels, started, now, sample.value) for sample in metric.samples if sample.name == name
    ]


def _distributions(metric: prometheus_client.Metric, started: int, now: int) -> Iterator[HistogramDataPoint]:
    """The points of a histogram, one for each set of labels."""
    counts: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
    sums: dict[frozenset[tuple[str, str]], float] = {}
    for sample in metric.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = frozenset(labels.items())
        if sample.name.endswith("_bucket"):
            counts.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            sums[key] = sample.value
    for key, cumulative in counts.items():
        upper = [bound for bound, _ in cumulative]
        totals = [int(count) for _, count in cumulative]
        buckets = [after - before for before, after in zip([0, *totals], totals, strict=False)]
        yield HistogramDataPoint(
            attributes=dict(key),
            start_time_unix_nano=started,
            time_unix_nano=now,
            count=totals[-1],
            sum=sums.get(key, 0.0),
            bucket_counts=buckets,
            explicit_bounds=upper[:-1],  # without infinity
            min=None,  # type: ignore[arg-type]  # they are optional in the protocol, and Prometheus has none
            max=None,  # type: ignore[arg-type]
        )


def _exporter(collector: Collector) -> MetricExporter:
    """The exporter of a protocol, which reads everything but the endpoint from its variables.

    Raises:
        OtlpSettingsError: one is not valid.
    """
    if collector.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as exporters  # noqa: PLC0415 takes 100 ms
    else:
        from opentelemetry.exporter.otlp.proto.http import metric_exporter as exporters  # type: ignore[no-redef]  # noqa: PLC0415
    try:
        return exporters.OTLPMetricExporter(endpoint=collector.endpoint)
    except Exception as error:  # error boundary: exporters have exceptions of their own for each variable
        raise OtlpSettingsError(f"a setting of OpenTelemetry is not valid: {error}") from error
