"""The KV cache, the prefix cache and speculation."""

from __future__ import annotations

from dashboards.boards.common import KV_USAGE, WAITING, by_model, hits, kv_usage, preemptions, running_and_waiting
from dashboards.panels import Dashboard, Limits, Lines, Query, Row, Stat
from dashboards.promql import MODELS, ratio

_DRAFTS, _DRAFTED = "quire:spec_decode_num_drafts_total", "quire:spec_decode_num_draft_tokens_total"
_ACCEPTED = "quire:spec_decode_num_accepted_tokens_total"


def dashboard() -> Dashboard:
    """How full KV caches are, what they save, and what drafts save."""
    return Dashboard(
        "quire-kv-cache",
        "Quire / KV cache",
        "How full KV caches are, what prefix caching saves, and what speculative decoding saves.",
        (_now(), _usage(), _prefixes(), _speculation()),
    )


def _now() -> Row:
    return Row(
        "Now",
        (
            kv_usage(),
            Stat(
                title="Blocks in use",
                about="Of all engines that are selected.",
                expression=MODELS.sum("quire:kv_cache_blocks_used"),
                unit="count",
            ),
            Stat(
                title="Prefix cache hits",
                about="Share of the looked-up prompt tokens that were in the prefix cache.",
                expression=MODELS.share("quire:prefix_cache_hits_total", "quire:prefix_cache_queries_total"),
                unit="share",
            ),
            Stat(
                title="Cached prompt tokens",
                about="Share of the prompt tokens of finished sequences that needed no prefill.",
                expression=MODELS.share("quire:prompt_tokens_cached_total", "quire:prompt_tokens_total"),
                unit="share",
            ),
            Stat(
                title="Preemptions",
                about="Sequences per second that gave up their blocks.",
                expression=MODELS.rate("quire:num_preemptions_total"),
                unit="per second",
                limits=Limits(0.01, 1),
            ),
            Stat(
                title="Waiting for capacity",
                about="Sequences that wait for a place in the batch or for KV blocks.",
                expression=MODELS.sum(WAITING, 'reason="capacity"'),
                unit="count",
            ),
        ),
    )


def _usage() -> Row:
    return Row(
        "Use",
        (
            by_model(
                "KV cache",
                "Share of KV blocks in use, of the fullest engine of each model.",
                MODELS.max(KV_USAGE, by="model_name"),
                "share",
                maximum=1,
            ),
            running_and_waiting(),
            preemptions(),
        ),
    )


def _prefixes() -> Row:
    prompt, cached = MODELS.rate("quire:prompt_tokens_total"), MODELS.rate("quire:prompt_tokens_cached_total")
    sequences = MODELS.rate("quire:request_prompt_tokens_count")
    return Row(
        "Prefix cache",
        (
            hits("Hits", "Share of the looked-up prompt tokens that were found.", "prefix_cache"),
            Lines(
                title="Prompt tokens",
                about="What prefill computes, and what it does not have to.",
                lines=(
                    Query(f"{prompt} - {cached}", "computed", "blue"),
                    Query(cached, "from the cache", "green"),
                ),
                unit="tokens/s",
                stacked=True,
            ),
            Lines(
                title="Prompt of a sequence",
                about="Mean length, and how much of it is computed.",
                lines=(
                    Query(ratio(prompt, sequences), "whole prompt", "gray"),
                    Query(ratio(f"({prompt} - {cached})", sequences), "computed", "blue"),
                ),
                unit="tokens",
            ),
        ),
    )


def _speculation() -> Row:
    return Row(
        "Speculative decoding (--speculative-method)",
        (
            by_model(
                "Accepted",
                "Share of draft tokens.",
                MODELS.share(_ACCEPTED, _DRAFTED, "model_name"),
                "share",
                maximum=1,
            ),
            by_model(
                "Tokens per verification",
                "One, and the accepted draft tokens.",
                f"1 + {MODELS.share(_ACCEPTED, _DRAFTS, 'model_name')}",
                "tokens",
            ),
            Lines(
                title="Draft tokens",
                about="A rejected token was computed for nothing.",
                lines=(
                    Query(MODELS.rate(_ACCEPTED), "accepted", "green"),
                    Query(f"{MODELS.rate(_DRAFTED)} - {MODELS.rate(_ACCEPTED)}", "rejected", "orange"),
                ),
                unit="tokens/s",
                stacked=True,
            ),
        ),
    )
