"""Pictures, videos and files in prompts."""

from __future__ import annotations

from dashboards.boards.common import E2E, PREFILL, PREPARATION, TTFT, WAITING, by_model, hits, latency
from dashboards.panels import Dashboard, Heatmap, Limits, Lines, Query, Row, Stat
from dashboards.promql import MODELS, ratio


def dashboard() -> Dashboard:
    """How long media take before the engine sees them, and what caches save of that."""
    return Dashboard(
        "quire-media",
        "Quire / Media",
        "Pictures, videos and files in prompts: their time before the engine, which the time to first token does not "
        "contain, and their caches.",
        (_now(), _preparation(), _caches(), _prompts()),
    )


def _now() -> Row:
    return Row(
        "Now",
        (
            Stat(
                title="Wait for media",
                about="Requests whose media are fetched, decoded or prepared.",
                expression=MODELS.sum(WAITING, 'reason="preprocessing"'),
                unit="count",
            ),
            Stat(
                title="Requests with media",
                about="Per second.",
                expression=MODELS.rate(f"{PREPARATION}_count"),
                unit="requests/s",
            ),
            Stat(
                title="Preparation p95",
                about="95 % of requests with media were prepared within this time.",
                expression=MODELS.quantile(0.95, PREPARATION),
                unit="seconds",
                limits=Limits(2, 10),
            ),
            Stat(
                title="TTFT p95",
                about="Of the sequences in the engine; preparation comes before it.",
                expression=MODELS.quantile(0.95, TTFT),
                unit="seconds",
            ),
            Stat(
                title="Prepared before",
                about="Share of pictures and videos that were prepared for another request.",
                expression=MODELS.share("quire:mm_cache_hits_total", "quire:mm_cache_queries_total"),
                unit="share",
            ),
            Stat(
                title="Encoded before",
                about="Share of items that the encoder need not encode.",
                expression=MODELS.share("quire:encoder_cache_hits_total", "quire:encoder_cache_queries_total"),
                unit="share",
            ),
        ),
    )


def _preparation() -> Row:
    return Row(
        "Preparation",
        (
            latency(
                "Preparation", "Of the media of a request: fetched, decoded, resized, waiting included.", PREPARATION
            ),
            by_model(
                "Requests that wait for media",
                "Many and growing: decoding needs more cores or `--max-media-memory`, or a host of media is slow.",
                MODELS.sum(WAITING, 'reason="preprocessing"', by="model_name"),
                "count",
            ),
            Heatmap(
                title="Durations",
                about="Requests per second by the time that their media took.",
                expression=MODELS.rate(f"{PREPARATION}_bucket", by="le"),
                unit="seconds",
            ),
        ),
    )


def _caches() -> Row:
    return Row(
        "Caches",
        (
            hits("Prepared before", "Share of pictures and videos in the cache of prepared ones.", "mm_cache", 6),
            _lookups("Prepared pictures and videos", "mm_cache"),
            hits("Encoded before", "Share of items in the encoder cache.", "encoder_cache", 6),
            _lookups("Encoded items", "encoder_cache"),
        ),
    )


def _lookups(title: str, cache: str) -> Lines:
    queries, found = (MODELS.rate(f"quire:{cache}_{name}_total") for name in ("queries", "hits"))
    return Lines(
        title=title,
        about="Look-ups in the cache. A miss is work.",
        lines=(Query(found, "hits", "green"), Query(f"{queries} - {found}", "misses", "orange")),
        unit="per second",
        stacked=True,
        width=6,
    )


def _prompts() -> Row:
    seconds = MODELS.rate(f"{PREPARATION}_sum", by="model_name")
    return Row(
        "In the engine",
        (
            by_model(
                "Preparation, share of the whole time",
                "Of all sequences of a model. Near 1, a faster engine helps nobody.",
                ratio(seconds, f"({seconds} + {MODELS.rate(f'{E2E}_sum', by='model_name')})"),
                "share",
                maximum=1,
            ),
            latency("Prefill", "Encoders run in the steps of prefill.", PREFILL),
            latency(
                "Prompt tokens", "A picture is hundreds or thousands.", "quire:request_prompt_tokens", unit="tokens"
            ),
        ),
    )
