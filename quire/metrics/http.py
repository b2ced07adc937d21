"""Metrics of HTTP requests."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter

from quire.metrics import buckets
from quire.metrics.batches import Batch, BatchHistogram, Mark


class AnsweredRequest(msgspec.Struct, frozen=True, gc=False):
    """An HTTP request that has ended.

    Attributes:
        handler: the template of its path.
        status: of its response.
        ended: monotonic seconds.
        seconds: until its response had been sent.
        trace_id: see `trace_of`.
    """

    method: str
    handler: str
    status: int
    ended: float
    seconds: float
    trace_id: str

    @property
    def labels(self) -> tuple[str, str, str]:
        """Those of the counter."""
        return self.method, self.handler, f"{self.status // 100}xx"


class HttpMetrics:
    """Count HTTP requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Define the metrics in a registry."""
        self.requests = Counter(
            "http_requests",
            "HTTP requests by method, handler and class of status (2xx to 5xx; 4xx also if the client disconnects "
            "before the response); /health, /ready, /ping, /metrics, /load and /version are not counted",
            ("method", "handler", "status"),
            registry=registry,
        )
        self.seconds = BatchHistogram(
            "http_request_duration_seconds",
            "Duration of a counted HTTP request, until its response has been sent",
            ("method", "handler"),
            buckets=buckets.HTTP,
            registry=registry,
        )
        self.answered = Batch(self._count)

    def _count(self, answered: Sequence[AnsweredRequest]) -> None:
        for labels, count in collections.Counter(request.labels for request in answered).items():
            self.requests.labels(*labels).inc(count)
        for method, handler in dict.fromkeys((request.method, request.handler) for request in answered):
            requests = [request for request in answered if request.method == method and request.handler == handler]
            marks = [Mark(request.trace_id, request.ended) for request in requests]
            self.seconds.labels(method, handler).observe_all([request.seconds for request in requests], marks)
