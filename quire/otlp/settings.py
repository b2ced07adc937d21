"""Whether and where traces and metrics are exported over OTLP: from flags, and from OpenTelemetry's variables."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args
from urllib.parse import urlsplit

Protocol = Literal["grpc", "http/protobuf"]
Signal = Literal["traces", "metrics"]
_MOST_NUMBER = 10**9  # of spans or milliseconds
_INSTANCE = str(uuid.uuid4())  # of this process, and of those that export for it


class OtlpSettingsError(ValueError):
    """A setting of an export is not valid. The text says which, and what is accepted."""


@dataclass(frozen=True, slots=True)
class Collector:
    """What takes traces or metrics.

    Attributes:
        endpoint: its URL; None: the exporter reads it from variables.
    """

    endpoint: str | None
    protocol: Protocol = "grpc"


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where traces are exported to, and how many spans wait for that.

    Attributes:
        max_queue_size: spans that wait; further ones are dropped.
        max_batch_size: spans that are sent together.
        delay: seconds until spans are sent although they are fewer.
        instance: the id of the server that they are of.
    """

    collector: Collector
    max_queue_size: int = 2048
    max_batch_size: int = 512
    delay: float = 5.0
    instance: str = field(default=_INSTANCE, compare=False)


@dataclass(frozen=True, slots=True)
class MetricSettings:
    """Where metrics are exported to, and how often.

    Attributes:
        interval: seconds between two exports.
        timeout: seconds that an export may take, with all its attempts.
        instance: the id of the server that they are of.
    """

    collector: Collector
    interval: float = 60.0
    timeout: float = 30.0
    instance: str = field(default=_INSTANCE, compare=False)


def trace_settings(endpoint: str | None, environment: Mapping[str, str]) -> TraceSettings | None:
    """Return the settings of the export of traces; None if requests are not traced.

    Args:
        endpoint: the value of --otlp-traces-endpoint.
        environment: variables.

    Raises:
        OtlpSettingsError: a setting is not valid.
    """
    general = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    collector = _collector("traces", endpoint, environment, starts=bool(general))
    if collector is None:
        return None
    size = _number(environment, "OTEL_BSP_MAX_QUEUE_SIZE", 2048)
    return TraceSettings(
        collector,
        max_queue_size=size,
        max_batch_size=min(size, _number(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)),
        delay=_number(environment, "OTEL_BSP_SCHEDULE_DELAY", 5000) / 1e3,
    )


def metric_settings(endpoint: str | None, environment: Mapping[str, str]) -> MetricSettings | None:
    """Return the settings of the export of metrics; None if there is none.

    OTEL_EXPORTER_OTLP_ENDPOINT alone does not start it: many collectors that it names take traces only.

    Args:
        endpoint: the value of --otlp-metrics-endpoint.
        environment: variables.

    Raises:
        OtlpSettingsError: a setting is not valid.
    """
    collector = _collector("metrics", endpoint, environment)
    if collector is None:
        return None
    return MetricSettings(
        collector,
        interval=_number(environment, "OTEL_METRIC_EXPORT_INTERVAL", 60_000) / 1e3,
        timeout=_number(environment, "OTEL_METRIC_EXPORT_TIMEOUT", 30_000) / 1e3,
    )


def _collector(
    signal: Signal, endpoint: str | None, environment: Mapping[str, str], *, starts: bool = False
) -> Collector | None:
    """The collector of a flag, or of variables; None if nothing is to be exported.

    Args:
        signal: what it takes.
        endpoint: the value of the flag.
        environment: variables.
        starts: something that concerns not this signal alone asks for the export.
    """

    def variable(*names: str) -> str:
        return next((value for name in names if (value := environment.get(name, "").strip())), "")

    exporter = f"OTEL_{signal.upper()}_EXPORTER"
    chosen = variable(exporter).lower()
    if variable("OTEL_SDK_DISABLED").lower() == "true" or chosen == "none":
        return None
    if chosen not in ("", "otlp"):
        raise OtlpSettingsError(f"{exporter} expects otlp or none, not {chosen!r}")
    prefix = f"OTEL_EXPORTER_OTLP_{signal.upper()}"
    if not (endpoint or starts or chosen or variable(f"{prefix}_ENDPOINT")):
        return None
    protocol = variable(f"{prefix}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if protocol not in get_args(Protocol):
        raise OtlpSettingsError(f"{prefix}_PROTOCOL expects {' or '.join(get_args(Protocol))}, not {protocol!r}")
    if endpoint and protocol != "grpc":
        endpoint = _http_endpoint(signal, endpoint)
    return Collector(endpoint or None, cast("Protocol", protocol))


def _http_endpoint(signal: Signal, endpoint: str) -> str:
    """The URL of a collector that speaks HTTP, with the path of the signal if it has none."""
    if "://" not in endpoint:
        raise OtlpSettingsError(f"--otlp-{signal}-endpoint expects a URL with http:// or https://, not {endpoint!r}")
    return endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/{signal}"


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    """The value of a variable: a number of spans, or of milliseconds."""
    text = environment.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text[:12]) <= _MOST_NUMBER:
        raise OtlpSettingsError(f"{name} expects a whole number from 1 to {_MOST_NUMBER}, not {text[:100]!r}")
    return int(text)
