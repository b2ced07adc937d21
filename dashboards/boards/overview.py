"""What an operator looks at first."""

from __future__ import annotations

from dashboards.boards.common import (
    E2E,
    FINISHED,
    HTTP_SECONDS,
    ITL,
    KV_USAGE,
    RUNNING,
    TTFT,
    WAITING,
    busy,
    by_model,
    failed_share,
    finished,
    http_status,
    kv_usage,
    latency,
    running_and_waiting,
    servers_down,
)
from dashboards.panels import Dashboard, Lines, Query, Row, Stat
from dashboards.promql import MODELS, SERVERS, ratio


def dashboard() -> Dashboard:
    """Traffic, latency, load and errors of all servers that are selected."""
    return Dashboard(
        "quire-overview",
        "Quire / Overview",
        "Traffic, latency, load and errors. Begin here; the others go on where something looks wrong.",
        (_now(), _latency(), _throughput(), _load(), _process()),
    )


def _now() -> Row:
    return Row(
        "Now",
        (
            Stat(
                title="Requests",
                about="Sequences that finished per second, for whatever reason.",
                expression=MODELS.rate(FINISHED),
                unit="requests/s",
            ),
            Stat(
                title="Prompt tokens",
                about="Prompt tokens per second, those in the prefix cache included.",
                expression=MODELS.rate("quire:prompt_tokens_total"),
                unit="tokens/s",
            ),
            Stat(
                title="Generated tokens",
                about="Generated tokens per second.",
                expression=MODELS.rate("quire:generation_tokens_total"),
                unit="tokens/s",
            ),
            Stat(title="Running", about="Sequences in the batches.", expression=MODELS.sum(RUNNING), unit="count"),
            Stat(
                title="Waiting",
                about="Sequences that wait for a place, for KV blocks, for their media or for input.",
                expression=MODELS.sum(WAITING),
                unit="count",
            ),
            servers_down(),
            Stat(
                title="TTFT p95",
                about="95 % of sequences had their first token within this time.",
                expression=MODELS.quantile(0.95, TTFT),
                unit="seconds",
            ),
            Stat(
                title="ITL p95",
                about="95 % of tokens followed the one before within this time.",
                expression=MODELS.quantile(0.95, ITL),
                unit="seconds",
            ),
            Stat(
                title="End to end p95",
                about="95 % of sequences were complete within this time.",
                expression=MODELS.quantile(0.95, E2E),
                unit="seconds",
            ),
            failed_share(),
            kv_usage(),
            Stat(
                title="Prefix cache hits",
                about="Share of the looked-up prompt tokens that were in the prefix cache.",
                expression=MODELS.share("quire:prefix_cache_hits_total", "quire:prefix_cache_queries_total"),
                unit="share",
            ),
        ),
    )


def _latency() -> Row:
    return Row(
        "Latency",
        (
            latency("Time to first token", "From arrival in the engine to the first token: queue and prefill.", TTFT),
            latency(
                "Inter-token latency", "Between two outputs of a sequence: what a reader of a stream notices.", ITL
            ),
            latency(
                "End to end",
                "From arrival in the engine to the end of the sequence. Below 0.3 s, quantiles are interpolated in one "
                "bucket.",
                E2E,
            ),
        ),
    )


def _throughput() -> Row:
    prompt, cached = MODELS.rate("quire:prompt_tokens_total"), MODELS.rate("quire:prompt_tokens_cached_total")
    return Row(
        "Throughput",
        (
            Lines(
                title="Tokens",
                about="Prompt tokens count when their sequence ends.",
                lines=(
                    Query(MODELS.rate("quire:generation_tokens_total"), "generated", "green"),
                    Query(f"{prompt} - {cached}", "prompt, computed", "blue"),
                    Query(cached, "prompt, from the prefix cache", "purple"),
                ),
                unit="tokens/s",
                stacked=True,
            ),
            finished(),
            http_status(),
        ),
    )


def _load() -> Row:
    return Row(
        "Load",
        (
            running_and_waiting(),
            by_model(
                "KV cache",
                "Share of KV blocks in use, of the fullest engine of each model.",
                MODELS.max(KV_USAGE, by="model_name"),
                "share",
                maximum=1,
            ),
            busy(),
        ),
    )


def _process() -> Row:
    by = "instance"
    return Row(
        "Process",
        (
            Lines(
                title="CPU",
                about="Processor time per second of the server's process, without those of `--engine-process`.",
                lines=(Query(SERVERS.rate("process_cpu_seconds_total", by=by), "{{instance}}"),),
                unit="cores",
                width=6,
            ),
            Lines(
                title="Memory",
                about="Resident memory of the server's process.",
                lines=(Query(SERVERS.max("process_resident_memory_bytes", by=by), "{{instance}}"),),
                unit="bytes",
                width=6,
            ),
            Lines(
                title="Open files",
                about="Open files as a share of the limit. A connection is one.",
                lines=(
                    Query(
                        ratio(SERVERS.max("process_open_fds", by=by), SERVERS.max("process_max_fds", by=by)),
                        "{{instance}}",
                    ),
                ),
                unit="share",
                maximum=1,
                width=6,
            ),
            Lines(
                title="HTTP requests take",
                about="Mean duration by endpoint, until the last byte of a stream.",
                lines=(Query(SERVERS.mean(HTTP_SECONDS, "handler"), "{{handler}}"),),
                unit="seconds",
                width=6,
            ),
        ),
    )
