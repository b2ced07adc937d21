"""Panels that several dashboards have."""

from __future__ import annotations

from dashboards.panels import Color, Limits, Lines, Query, Stat, Unit
from dashboards.promql import MODELS, SERVERS, ratio

E2E = "quire:e2e_request_latency_seconds"
TTFT = "quire:time_to_first_token_seconds"
ITL = "quire:inter_token_latency_seconds"
QUEUE = "quire:request_queue_time_seconds"
PREFILL = "quire:request_prefill_time_seconds"
DECODE = "quire:request_decode_time_seconds"
PREPARATION = "quire:mm_preprocess_seconds"
GRAMMAR = "quire:grammar_check_seconds"
FINISHED = "quire:request_success_total"
RUNNING = "quire:num_requests_running"
WAITING = "quire:num_requests_waiting_by_reason"
KV_USAGE = "quire:kv_cache_usage_perc"
STEP_SECONDS = "quire:step_duration_seconds_sum"
HTTP = "http_requests_total"
HTTP_SECONDS = "http_request_duration_seconds"

STATUS_COLORS: dict[str, Color] = {"2xx": "green", "3xx": "blue", "4xx": "yellow", "5xx": "red"}
ERROR_SHARE = Limits(0.001, 0.01)
FULL = Limits(0.9, 0.98)
ANY = Limits(0.001, 1)  # of what should not happen
_FINISH_COLORS: dict[str, Color] = {"stop": "green", "length": "blue", "abort": "orange", "error": "red"}
_REASON_COLORS: dict[str, Color] = {
    "capacity": "orange",
    "preprocessing": "purple",
    "grammar": "yellow",
    "deferred": "blue",
}


def latency(title: str, about: str, histogram: str, width: int = 8, unit: Unit = "seconds") -> Lines:
    """Quantiles of a histogram over all models that are selected."""
    lines = (
        Query(MODELS.quantile(0.5, histogram), "p50", "p50"),
        Query(MODELS.quantile(0.95, histogram), "p95", "p95", exemplars=unit == "seconds"),
        Query(MODELS.quantile(0.99, histogram), "p99", "p99"),
    )
    return Lines(title=title, about=about, lines=lines, unit=unit, width=width)


def by_model(
    title: str, about: str, expression: str, unit: Unit, width: int = 8, maximum: float | None = None
) -> Lines:
    """A line for each model. The expression keeps its name."""
    lines = (Query(expression, "{{model_name}}"),)
    return Lines(title=title, about=about, lines=lines, unit=unit, width=width, maximum=maximum)


def hits(title: str, about: str, cache: str, width: int = 8) -> Lines:
    """The share of look-ups in a cache that found something, of each model."""
    expression = MODELS.share(f"quire:{cache}_hits_total", f"quire:{cache}_queries_total", "model_name")
    return by_model(title, about, expression, "share", width, maximum=1)


def running_and_waiting(width: int = 8) -> Lines:
    """The queue, by what its sequences wait for."""
    return Lines(
        title="Running and waiting",
        about="Sequences in the batch, and what the others wait for: *capacity*, a place or KV blocks; "
        "*preprocessing*, their media; *grammar*, the check of their schema; *deferred*, more input.",
        lines=(
            Query(MODELS.sum(RUNNING), "running", "green"),
            Query(MODELS.sum(WAITING, by="reason"), "{{reason}}"),
        ),
        colors=_REASON_COLORS,
        unit="count",
        width=width,
    )


def finished(width: int = 8) -> Lines:
    """Finished sequences by reason."""
    return Lines(
        title="Finished sequences",
        about="How sequences ended: *stop*, by themselves; *length*, at max_tokens; *abort*, the client has gone; "
        "*error*, the server failed.",
        lines=(Query(MODELS.rate(FINISHED, by="finished_reason"), "{{finished_reason}}"),),
        colors=_FINISH_COLORS,
        unit="requests/s",
        stacked=True,
        width=width,
    )


def http_status(width: int = 8) -> Lines:
    """HTTP requests by the class of their status."""
    return Lines(
        title="HTTP requests",
        about="By class of status; a client that disconnects before the response counts as 4xx. Probes are not "
        "counted. The variable *Model* has no effect here.",
        lines=(Query(SERVERS.rate(HTTP, by="status"), "{{status}}"),),
        colors=STATUS_COLORS,
        unit="requests/s",
        stacked=True,
        width=width,
    )


def failed_share() -> Stat:
    """The share of HTTP requests that failed by the server's fault."""
    return Stat(
        title="5xx",
        about="Share of HTTP requests with status 5xx. A stream that fails after its first byte has status 200: see "
        "the finished sequences with the reason *error*.",
        expression=share_of_status("5xx"),
        unit="share",
        limits=ERROR_SHARE,
    )


def share_of_status(status: str) -> str:
    """The share of HTTP requests with a class of status, which none may have had yet."""
    part = SERVERS.rate(HTTP, f'status="{status}"')
    return ratio(f"({part} or vector(0))", SERVERS.rate(HTTP))


def busy(width: int = 8) -> Lines:
    """How much of the time engines run steps."""
    return by_model(
        "Engine busy",
        "Share of time in which the busiest engine of each model runs steps. At 1 it has no time left: more "
        "sequences make all slower.",
        MODELS.busiest_rate(STEP_SECONDS, by="model_name"),
        "share",
        width,
        maximum=1,
    )


def servers_down() -> Stat:
    """Servers that Prometheus does not reach."""
    return Stat(
        title="Servers down",
        about="Servers that Prometheus cannot scrape (`up` is 0). Their other metrics end.",
        expression='count(up{job=~"$job"} == 0) or vector(0)',
        unit="count",
        limits=Limits(1, 1),
    )


def kv_usage() -> Stat:
    """How full the fullest KV cache is."""
    return Stat(
        title="KV cache",
        about="Use of the fullest KV cache. Near 1, new sequences wait and running ones are preempted.",
        expression=MODELS.max(KV_USAGE),
        unit="share",
        limits=FULL,
    )


def preemptions(width: int = 8) -> Lines:
    """Preempted sequences."""
    return by_model(
        "Preemptions",
        "Running sequences that gave up their KV blocks; they are computed again later. Lasting preemptions: the KV "
        "cache is too small for so many sequences (`--kv-cache-memory-bytes`, `--max-num-seqs`).",
        MODELS.rate("quire:num_preemptions_total", by="model_name"),
        "per second",
        width,
    )
