"""Whether and where metrics are sent over OTLP: from a flag, and from the variables that OpenTelemetry defines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args
from urllib.parse import urlsplit

Protocol = Literal["grpc", "http/protobuf"]
_PATH = "/v1/metrics"


class OtlpSettingsError(ValueError):
    """A setting is not valid. The text says which, and what is accepted."""


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """Where metrics are sent to, and how often.

    Attributes:
        endpoint: URL of a collector; None: the exporter reads it from variables.
        interval: seconds between two exports.
        timeout: seconds that an export may take, with all its attempts.
    """

    endpoint: str | None
    protocol: Protocol = "grpc"
    interval: float = 60.0
    timeout: float = 30.0


def otlp_settings(endpoint: str | None, environment: Mapping[str, str]) -> OtlpSettings | None:
    """Return the settings of the export of metrics; None if there is none.

    OTEL_EXPORTER_OTLP_ENDPOINT alone does not start it: many collectors that it names take traces only.

    Args:
        endpoint: the value of --otlp-metrics-endpoint.
        environment: variables.

    Raises:
        OtlpSettingsError: a setting is not valid.
    """

    def variable(*names: str) -> str:
        return next((value for name in names if (value := environment.get(name, "").strip())), "")

    exporter = variable("OTEL_METRICS_EXPORTER").lower()
    if variable("OTEL_SDK_DISABLED").lower() == "true" or exporter == "none":
        return None
    if exporter not in ("", "otlp"):
        raise OtlpSettingsError(f"OTEL_METRICS_EXPORTER expects otlp or none, not {exporter!r}")
    if not (endpoint or exporter or variable("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")):
        return None
    protocol = variable("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if protocol not in get_args(Protocol):
        raise OtlpSettingsError(
            f"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL expects {' or '.join(get_args(Protocol))}, not {protocol!r}"
        )
    if endpoint and "://" not in endpoint and protocol != "grpc":
        raise OtlpSettingsError(f"--otlp-metrics-endpoint expects a URL with http:// or https://, not {endpoint!r}")
    return OtlpSettings(
        endpoint=_with_path(endpoint, protocol) if endpoint else None,
        protocol=cast("Protocol", protocol),
        interval=_seconds(environment, "OTEL_METRIC_EXPORT_INTERVAL", 60_000),
        timeout=_seconds(environment, "OTEL_METRIC_EXPORT_TIMEOUT", 30_000),
    )


def _with_path(endpoint: str, protocol: str) -> str:
    """An endpoint over HTTP with the path of metrics, if it has none."""
    if protocol == "grpc" or urlsplit(endpoint).path.strip("/"):
        return endpoint
    return endpoint.rstrip("/") + _PATH


def _seconds(environment: Mapping[str, str], name: str, default: int) -> float:
    """The value of a variable in milliseconds, as seconds."""
    text = environment.get(name, "").strip()
    if not text:
        return default / 1e3
    if not text.isdecimal() or not 1 <= int(text[:12]) <= 10**9:
        raise OtlpSettingsError(f"{name} expects milliseconds from 1 to {10**9}, not {text[:100]!r}")
    return int(text) / 1e3
