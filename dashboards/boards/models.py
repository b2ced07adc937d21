"""Models side by side."""

from __future__ import annotations

from dashboards.boards.common import (
    E2E,
    ERROR_SHARE,
    FINISHED,
    FULL,
    ITL,
    KV_USAGE,
    QUEUE,
    RUNNING,
    TTFT,
    busy,
    by_model,
)
from dashboards.panels import Column, Dashboard, Info, Row, Table
from dashboards.promql import MODELS, ratio

_BY = "model_name"
_PARSED = "quire:tool_call_parser_invocations_total"
_SLEEP, _AWAKE = "quire:engine_sleep_state", 'sleep_state="awake"'


def dashboard() -> Dashboard:
    """The models that are selected, in a table and as lines."""
    return Dashboard(
        "quire-models",
        "Quire / Models",
        "Models side by side: traffic, latency, load, settings and states.",
        (_table(), _traffic(), _latency(), _engines()),
    )


def _table() -> Row:
    errors = ratio(MODELS.rate(FINISHED, 'finished_reason="error"', by=_BY), MODELS.rate(FINISHED, by=_BY))
    columns = (
        Column("Requests", MODELS.rate(FINISHED, by=_BY), "requests/s"),
        Column("Prompt", MODELS.rate("quire:prompt_tokens_total", by=_BY), "tokens/s"),
        Column("Generated", MODELS.rate("quire:generation_tokens_total", by=_BY), "tokens/s"),
        Column("TTFT p95", MODELS.quantile(0.95, TTFT, _BY), "seconds"),
        Column("ITL p95", MODELS.quantile(0.95, ITL, _BY), "seconds"),
        Column("Running", MODELS.sum(RUNNING, by=_BY), "count"),
        Column("Waiting", MODELS.sum("quire:num_requests_waiting", by=_BY), "count"),
        Column("KV cache", MODELS.max(KV_USAGE, by=_BY), "share", FULL),
        Column("Errors", errors, "share", ERROR_SHARE),
    )
    about = "The latest values. *Errors*: share of finished sequences that the server failed."
    return Row("Now", (Table(title="Models", about=about, labels={_BY: "Model"}, columns=columns, height=7),))


def _traffic() -> Row:
    return Row(
        "Traffic",
        (
            by_model("Requests", "Sequences that finished.", MODELS.rate(FINISHED, by=_BY), "requests/s", 6),
            by_model(
                "Prompt tokens",
                "Cached ones included.",
                MODELS.rate("quire:prompt_tokens_total", by=_BY),
                "tokens/s",
                6,
            ),
            by_model(
                "Generated tokens",
                "Embeddings and other pooled inputs generate none.",
                MODELS.rate("quire:generation_tokens_total", by=_BY),
                "tokens/s",
                6,
            ),
            by_model(
                "Tool calls",
                "Answers, or pieces of streamed ones, in which a parser found a tool call.",
                MODELS.rate(_PARSED, 'outcome="tool_call"', by=_BY),
                "per second",
                6,
            ),
        ),
    )


def _latency() -> Row:
    p95 = ((TTFT, "Time to first token, p95"), (ITL, "Inter-token latency, p95"), (E2E, "End to end, p95"))
    return Row(
        "Latency",
        (
            *(by_model(title, "Of each model.", MODELS.quantile(0.95, name, _BY), "seconds", 6) for name, title in p95),
            by_model("Queue, mean", "From arrival until it is scheduled.", MODELS.mean(QUEUE, _BY), "seconds", 6),
        ),
    )


def _engines() -> Row:
    by = "instance, model_name, engine"
    return Row(
        "Engines",
        (
            by_model("Running", "Sequences in the batch.", MODELS.sum(RUNNING, by=_BY), "count", 6),
            busy(6),
            by_model(
                "Asleep",
                "Engines without weights or KV cache, after `POST /sleep`.",
                f"{MODELS.count(_SLEEP, _AWAKE, by=_BY)} - {MODELS.sum(_SLEEP, _AWAKE, by=_BY)}",
                "count",
                6,
            ),
            by_model(
                "Restarts",
                "Restarts of engines after their death, in the time that the dashboard shows.",
                f"sum by ({_BY}) (increase({MODELS.series('quire:engine_restarts_total')}[$__range]))",
                "count",
                6,
            ),
            Info(
                title="Settings of the KV cache",
                about="Of each engine.",
                expression=f"max by ({by}, block_size, num_gpu_blocks, cache_dtype, enable_prefix_caching, "
                f"prefix_caching_hash_algo) ({MODELS.series('quire:cache_config_info')})",
                labels={
                    "instance": "Server",
                    "model_name": "Model",
                    "engine": "Engine",
                    "num_gpu_blocks": "Blocks",
                    "block_size": "Tokens per block",
                    "cache_dtype": "Data type",
                    "enable_prefix_caching": "Prefix cache",
                    "prefix_caching_hash_algo": "Hash",
                },
                height=6,
            ),
        ),
    )
