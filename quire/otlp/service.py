"""The service that traces and metrics are of, as attributes. Imports OpenTelemetry's SDK."""

from __future__ import annotations

from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)

from quire import __version__


def service_of(instance: str) -> Resource:
    """Return what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say of the service, else Quire.

    `instance`: an id that tells servers apart whose metrics a collector adds up, the same for all that it gets of one.
    """
    quire = {SERVICE_NAME: "quire", SERVICE_VERSION: __version__, SERVICE_INSTANCE_ID: instance}
    return Resource.create({**quire, **OTELResourceDetector().detect().attributes})
