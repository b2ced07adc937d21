"""Flags and variables that say whether and where traces and metrics are exported."""

from __future__ import annotations

from typing import Any

import pytest

from quire.otlp.settings import (
    Collector,
    MetricSettings,
    OtlpSettingsError,
    TraceSettings,
    metric_settings,
    trace_settings,
)

URL = "http://collector:4317"
HTTP = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
FROM_VARIABLES = Collector(None)


@pytest.mark.parametrize(
    ("endpoint", "environment", "traces", "metrics"),
    [
        (None, {}, None, None),
        (None, {"OTEL_SERVICE_NAME": "x", "OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}, FROM_VARIABLES, None),  # many collectors take traces only
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}, FROM_VARIABLES, None),
        (None, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": URL}, None, FROM_VARIABLES),
        (None, {"OTEL_TRACES_EXPORTER": "otlp"}, FROM_VARIABLES, None),
        (None, {"OTEL_METRICS_EXPORTER": "otlp"}, None, FROM_VARIABLES),
        (URL, {}, Collector(URL), Collector(URL)),
        (URL, {"OTEL_TRACES_EXPORTER": "none"}, None, Collector(URL)),
        (URL, {"OTEL_METRICS_EXPORTER": "none"}, Collector(URL), None),
        (URL, {"OTEL_SDK_DISABLED": "TRUE"}, None, None),
        (URL, {"OTEL_SDK_DISABLED": "false"}, Collector(URL), Collector(URL)),
        (
            "http://collector:4318",
            HTTP,
            Collector("http://collector:4318/v1/traces", "http/protobuf"),
            Collector("http://collector:4318/v1/metrics", "http/protobuf"),
        ),
        (
            "http://collector/my/path",
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            Collector("http://collector/my/path", "http/protobuf"),
            Collector("http://collector/my/path"),
        ),
    ],
)
def test_a_flag_or_a_variable_says_what_is_exported(
    endpoint: str | None, environment: dict[str, str], traces: Collector | None, metrics: Collector | None
) -> None:
    assert trace_settings(endpoint, environment) == (None if traces is None else TraceSettings(traces))
    assert metric_settings(endpoint, environment) == (None if metrics is None else MetricSettings(metrics))


def test_variables_say_how_much_is_sent_and_when() -> None:
    environment = {
        "OTEL_BSP_MAX_QUEUE_SIZE": "100",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "512",
        "OTEL_BSP_SCHEDULE_DELAY": "250",
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
        "OTEL_METRIC_EXPORT_TIMEOUT": "125",
    }
    assert trace_settings(URL, environment) == TraceSettings(Collector(URL), 100, 100, 0.25)
    assert metric_settings(URL, environment) == MetricSettings(Collector(URL), 0.5, 0.125)


def test_traces_and_metrics_are_of_one_instance() -> None:
    traces, metrics = trace_settings(URL, {}), metric_settings(URL, {})
    assert traces is not None
    assert metrics is not None
    assert traces.instance == metrics.instance


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER expects otlp or none, not 'zipkin'"),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL expects grpc or http/protobuf, not 'http/json'",
        ),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "OTEL_BSP_MAX_QUEUE_SIZE expects a whole number from 1 to 1000000000"),
        ({"OTEL_BSP_SCHEDULE_DELAY": "5s"}, "OTEL_BSP_SCHEDULE_DELAY expects a whole number from 1 to 1000000000"),
        ({"OTEL_METRICS_EXPORTER": "console"}, "OTEL_METRICS_EXPORTER expects otlp or none, not 'console'"),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "1s"}, "OTEL_METRIC_EXPORT_INTERVAL expects a whole number"),
        ({"OTEL_METRIC_EXPORT_TIMEOUT": "9" * 5000}, "OTEL_METRIC_EXPORT_TIMEOUT expects a whole number"),
    ],
)
def test_other_values_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(OtlpSettingsError, match=message):
        (metric_settings if "METRIC" in message else trace_settings)(URL, environment)


@pytest.mark.parametrize("settings", [trace_settings, metric_settings])
def test_an_endpoint_over_http_has_a_scheme(settings: Any) -> None:
    with pytest.raises(OtlpSettingsError, match=r"-endpoint expects a URL with http:// or https://, not 'collector"):
        settings("collector:4318", HTTP)
