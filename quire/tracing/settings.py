"""Whether and where traces are exported: from flags, and from the variables that OpenTelemetry defines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast
from urllib.parse import urlsplit

Protocol = Literal["grpc", "http/protobuf"]
_PROTOCOLS = ("grpc", "http/protobuf")
_TRACES_PATH = "/v1/traces"


class TraceSettingsError(ValueError):
    """A setting of traces is not valid. The text says which, and what is accepted."""


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where traces are exported to, and how many spans wait for that.

    Attributes:
        endpoint: URL of a collector; None: the exporter reads it from variables.
        max_queue_size: spans that wait; further ones are dropped.
        max_batch_size: spans that are sent together.
        delay: seconds until spans are sent although they are fewer.
    """

    endpoint: str | None
    protocol: Protocol
    max_queue_size: int = 2048
    max_batch_size: int = 512
    delay: float = 5.0


def trace_settings(endpoint: str | None, environment: Mapping[str, str]) -> TraceSettings | None:
    """Settings of traces; None if requests are not traced.

    They are with `endpoint` (--otlp-traces-endpoint) or a variable that has one, unless variables switch them off.

    Raises:
        TraceSettingsError: a setting is not valid.
    """

    def variable(*names: str) -> str:
        return next((value for name in names if (value := environment.get(name, "").strip())), "")

    exporter = variable("OTEL_TRACES_EXPORTER").lower()
    if variable("OTEL_SDK_DISABLED").lower() == "true" or exporter == "none":
        return None
    if exporter not in ("", "otlp"):
        raise TraceSettingsError(f"OTEL_TRACES_EXPORTER expects otlp or none, not {exporter!r}")
    endpoint_variable = variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if not (endpoint or endpoint_variable or exporter):
        return None
    protocol = variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if protocol not in _PROTOCOLS:
        raise TraceSettingsError(
            f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL expects {' or '.join(_PROTOCOLS)}, not {protocol!r}"
        )
    size = _number(environment, "OTEL_BSP_MAX_QUEUE_SIZE", 2048)
    return TraceSettings(
        endpoint=_with_path(endpoint, protocol) if endpoint else None,
        protocol=cast("Protocol", protocol),
        max_queue_size=size,
        max_batch_size=min(size, _number(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)),
        delay=_number(environment, "OTEL_BSP_SCHEDULE_DELAY", 5000) / 1e3,
    )


def _with_path(endpoint: str, protocol: str) -> str:
    """An endpoint over HTTP with the path of traces, if it has none."""
    if protocol == "grpc" or urlsplit(endpoint).path.strip("/"):
        return endpoint
    return endpoint.rstrip("/") + _TRACES_PATH


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or not int(text):
        raise TraceSettingsError(f"{name} expects a whole number above 0, not {text!r}")
    return int(text)
