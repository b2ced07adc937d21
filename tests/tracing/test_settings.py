"""Flags and variables that say whether and where traces are exported."""

from __future__ import annotations

import pytest

from quire.tracing.settings import TraceSettings, TraceSettingsError, trace_settings

URL = "http://collector:4317"


@pytest.mark.parametrize(
    ("endpoint", "environment", "expected"),
    [
        (None, {}, None),
        (None, {"OTEL_SERVICE_NAME": "x", "OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        (None, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": URL}, None),
        (URL, {}, TraceSettings(URL, "grpc")),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}, TraceSettings(None, "grpc")),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}, TraceSettings(None, "grpc")),
        (None, {"OTEL_TRACES_EXPORTER": "otlp"}, TraceSettings(None, "grpc")),
        (URL, {"OTEL_TRACES_EXPORTER": "none"}, None),
        (URL, {"OTEL_SDK_DISABLED": "TRUE"}, None),
        (URL, {"OTEL_SDK_DISABLED": "false"}, TraceSettings(URL, "grpc")),
        (
            "http://collector:4318",
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            TraceSettings("http://collector:4318/v1/traces", "http/protobuf"),
        ),
        (
            "http://collector/my/path",
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            TraceSettings("http://collector/my/path", "http/protobuf"),
        ),
        (
            URL,
            {
                "OTEL_BSP_MAX_QUEUE_SIZE": "100",
                "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "512",
                "OTEL_BSP_SCHEDULE_DELAY": "250",
            },
            TraceSettings(URL, "grpc", 100, 100, 0.25),
        ),
    ],
)
def test_traces_are_exported_if_a_flag_or_variable_says_where(
    endpoint: str | None, environment: dict[str, str], expected: TraceSettings | None
) -> None:
    assert trace_settings(endpoint, environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER expects otlp or none, not 'zipkin'"),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL expects grpc or http/protobuf, not 'http/json'",
        ),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "OTEL_BSP_MAX_QUEUE_SIZE expects a whole number above 0, not '0'"),
        ({"OTEL_BSP_SCHEDULE_DELAY": "5s"}, "OTEL_BSP_SCHEDULE_DELAY expects a whole number above 0, not '5s'"),
    ],
)
def test_other_values_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(TraceSettingsError) as error:
        trace_settings(URL, environment)
    assert str(error.value) == message
