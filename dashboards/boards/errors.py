"""What went wrong, and whose fault it was."""

from __future__ import annotations

from dashboards.boards.common import (
    ANY,
    FINISHED,
    HTTP,
    by_model,
    failed_share,
    finished,
    http_status,
    servers_down,
    share_of_status,
)
from dashboards.panels import Dashboard, Limits, Lines, Query, Row, Stat
from dashboards.promql import MODELS, SERVERS, ratio

_CORRUPTED, _RESTARTS = "quire:corrupted_requests_total", "quire:engine_restarts_total"
_REFUSED, _LIMITED = "quire:admission_rejections_total", "quire:rate_limited_requests_total"


def dashboard() -> Dashboard:
    """Refusals, failures, clients that left, and engines that died."""
    return Dashboard(
        "quire-errors",
        "Quire / Errors",
        "Refusals, failures, clients that left, and engines that died.",
        (_now(), _http(), _sequences(), _refusals(), _servers()),
    )


def _now() -> Row:
    return Row(
        "Now",
        (
            failed_share(),
            Stat(
                title="4xx",
                about="Share of HTTP requests with status 4xx: requests that cannot be served, wrong keys, clients "
                "that left.",
                expression=share_of_status("4xx"),
                unit="share",
            ),
            Stat(
                title="Failed sequences",
                about="Share of finished sequences with the reason *error*.",
                expression=_share_of("error"),
                unit="share",
                limits=Limits(0.001, 0.01),
            ),
            Stat(
                title="Aborted sequences",
                about="Share of finished sequences whose client had gone.",
                expression=_share_of("abort"),
                unit="share",
                limits=Limits(0.1, 0.3),
            ),
            Stat(
                title="Refused",
                about="Requests per second that were refused because too many sequences ran or waited.",
                expression=MODELS.rate(_REFUSED),
                unit="requests/s",
                limits=ANY,
            ),
            servers_down(),
        ),
    )


def _share_of(reason: str) -> str:
    return ratio(MODELS.rate(FINISHED, f'finished_reason="{reason}"'), MODELS.rate(FINISHED))


def _http() -> Row:
    return Row(
        "HTTP",
        (
            http_status(),
            Lines(
                title="4xx by endpoint",
                about="*unmatched*: paths that do not exist.",
                lines=(Query(SERVERS.rate(HTTP, 'status="4xx"', by="handler"), "{{handler}}"),),
                unit="requests/s",
                stacked=True,
            ),
            Lines(
                title="5xx by endpoint",
                about="503: the queue is full, a model sleeps or restarts, or the server stops. 500: see the log.",
                lines=(Query(SERVERS.rate(HTTP, 'status="5xx"', by="handler"), "{{handler}}"),),
                unit="requests/s",
                stacked=True,
            ),
        ),
    )


def _sequences() -> Row:
    failed = MODELS.rate(FINISHED, 'finished_reason="error"', by="model_name")
    return Row("Sequences", (finished(12), by_model("Failed", "The server failed them.", failed, "requests/s", 12)))


def _refusals() -> Row:
    return Row(
        "Refusals",
        (
            Lines(
                title="Refused because of the queue",
                about="Too many sequences ran or waited. *max_num_queued_reqs*: of all clients "
                "(`--max-num-queued-seqs`), status 503; *max_client_share*: of one client, status 429.",
                lines=(Query(MODELS.rate(_REFUSED, by="model_name, reason"), "{{model_name}}: {{reason}}"),),
                unit="requests/s",
                width=12,
            ),
            Lines(
                title="Refused because of a key's limit",
                about="Status 429, by the name of the key and by the limit. The variable *Model* has no effect here.",
                lines=(Query(SERVERS.rate(_LIMITED, by="key, reason"), "{{key}}: {{reason}}"),),
                unit="requests/s",
                width=12,
            ),
        ),
    )


def _servers() -> Row:
    return Row(
        "Engines and servers",
        (
            by_model(
                "Restarts of engines", "Since the server started.", MODELS.sum(_RESTARTS, by="model_name"), "count", 6
            ),
            by_model(
                "NaN or infinity",
                "Sequences for which the model computed no number: weights or a kernel are broken.",
                MODELS.sum(_CORRUPTED, by="model_name"),
                "count",
                6,
            ),
            Lines(
                title="Up",
                about="For how long each server has run. A saw is a server that dies again and again.",
                lines=(Query(f"time() - {SERVERS.max('process_start_time_seconds', by='instance')}", "{{instance}}"),),
                unit="seconds",
                width=6,
            ),
            Lines(
                title="Spans of traces that were not exported",
                about="The collector is down or slow, or more spans come than are exported. Requests go on.",
                lines=(Query(SERVERS.rate("quire:trace_spans_dropped_total", by="instance"), "{{instance}}"),),
                unit="per second",
                width=6,
            ),
        ),
    )
