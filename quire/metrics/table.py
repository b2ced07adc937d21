"""Writes docs/metrics.md: `python -m quire.metrics.table > docs/metrics.md`."""

from __future__ import annotations

from prometheus_client import Metric

from quire.metrics.aliases import DEPRECATED, Deprecated, successor_name, wire_name
from quire.metrics.prometheus import Metrics

_HEAD = """# Metrics

`GET /metrics` exports these metrics. Those marked in the column vLLM are also exported with the prefix `vllm:` instead
of `quire:`, unless `--no-vllm-metric-names` is set. Metrics of models have the labels `model_name` and `engine` (the
number of the model in the order of the command line, from 0, or of the replica; several ranks are one engine). A
request with `n` answers, or with several inputs, has that many sequences. `kv_block_*` need `--kv-cache-metrics`.

Metrics of the process (`process_*`: memory, CPU time, open files) are those of Prometheus' client library.

| name | type | vLLM | meaning |
|---|---|---|---|
"""
_AFTER_TABLE = """
Of vLLM's metrics there are not: `lora_requests_info`, as requests cannot choose adapters; those of
KV connectors, as blocks are not sent to other servers; `estimated_flops_*`. The flag
`--disable-log-stats` does not switch metrics off.

## Formats

The format is Prometheus' text (version 0.0.4), or [OpenMetrics](https://prometheus.io/docs/specs/om/open_metrics_spec/)
1.0 if the `Accept` header prefers `application/openmetrics-text`, as that of Prometheus does. With `Accept-Encoding:
gzip` the body is compressed. Any number of Prometheus servers may scrape at once: scrapes that come while one is
answered share the next rendering, which is done in slices of a millisecond, between which requests go on.
`PROMETHEUS_MULTIPROC_DIR` is not needed: one process has all metrics, or adds up those of
all (`--api-server-count`), and `quire:api_server_requests_total` has the requests of each.

## Exemplars

In OpenMetrics the latencies of requests have exemplars: the bucket of a slow request has the id of its trace
(`trace_id`), which leads from a dashboard to what the request did. Only requests have them whose trace is recorded:
their header `traceparent` says so, or the server itself records it. Prometheus stores exemplars with
`--enable-feature=exemplar-storage`.

## Buckets

`--custom-histogram-buckets` replaces the buckets of histograms, by family. Its value is a JSON object of ascending
lists, such as `{"time_to_first_token": [0.05, 0.1, 0.5, 2]}`. Dashboards that add up histograms of several servers need
the same buckets on all of them.

| key | histograms |
|---|---|
"""
_DEPRECATION = """
## Deprecated metrics

Names, types and labels of metrics are an interface: dashboards and autoscalers break in silence when they change. A
metric is renamed or removed in three steps, as in vLLM. In one release it is deprecated: its help text says
`DEPRECATED` and names the successor. In a later one it is hidden: `--show-hidden-metrics-for-version=X.Y` exports what
was hidden in version X.Y or later. In a still later one it is gone.

These are names that vLLM has removed, and that routers and dashboards still read. The versions are vLLM's.

| name | type | hidden since | use instead |
|---|---|---|---|
"""
_TAIL = """
## Metrics over OTLP

`--otlp-metrics-endpoint URL` also sends the metrics to an OpenTelemetry collector: all that `/metrics` has, under the
same names, and three of OpenTelemetry's conventions for generative AI: `gen_ai.server.request.duration`,
`gen_ai.server.time_to_first_token` and `gen_ai.server.time_per_output_token`, each counted from a sequence's arrival at
the engine. `OTEL_METRICS_EXPORTER=otlp` or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` start the export as well. Of the other
variables `OTEL_EXPORTER_OTLP_METRICS_PROTOCOL` (`grpc`, the default, or `http/protobuf`), `OTEL_METRIC_EXPORT_INTERVAL`
(60,000 ms), `OTEL_METRIC_EXPORT_TIMEOUT`, those of headers and certificates, `OTEL_SERVICE_NAME` and
`OTEL_RESOURCE_ATTRIBUTES` are obeyed. Over gRPC an `http://` URL means a connection without TLS.

The numbers are cumulative, so nothing is kept for a collector that is down: the next message has them all. The last one
is sent when the server stops, which takes a second at most.

This page is written by `python -m quire.metrics.table`; a test keeps it up to date.
"""


def page() -> str:
    """The text of docs/metrics.md."""
    metrics = Metrics(max_model_len=1, vllm_names=False, kv_cache_metrics=True)
    families = list(metrics.families())
    histograms = [
        f"| `{family}` | {', '.join(f'`{name}`' for name in names)} |\n"
        for family, names in metrics.histogram_families.items()
    ]
    types = {metric.name: metric.type for metric, _ in families}
    rows = [_row(metric, alias=alias) for metric, alias in families]
    deprecated = [_deprecated_row(entry, types[f"quire:{entry.successor}"]) for entry in DEPRECATED]
    return "".join([_HEAD, *rows, _AFTER_TABLE, *histograms, _DEPRECATION, *deprecated, _TAIL])


def _row(metric: Metric, *, alias: bool) -> str:
    name = wire_name(metric.name, metric.type)
    return f"| `{name}` | {metric.type} | {'yes' if alias else ''} | {metric.documentation} |\n"


def _deprecated_row(entry: Deprecated, successor_type: str) -> str:
    kind = "gauge" if entry.is_zero else successor_type
    successor = wire_name(successor_name(entry), successor_type)
    remark = "; always 0" if entry.is_zero else ""
    return f"| `{wire_name(entry.name, kind)}` | {kind} | {entry.hidden_since or ''} | `{successor}`{remark} |\n"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201 writes the page
