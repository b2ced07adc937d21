"""The KV cache, the prefix cache and speculation."""

from __future__ import annotations

from dashboards.boards.common import (
    KV_USAGE,
    WAITING,
    by_model,
    hits,
    kv_usage,
    latency,
    preemptions,
    running_and_waiting,
)
from dashboards.panels import Dashboard, Limits, Lines, Query, Row, Stat
from dashboards.promql import MODELS, ratio

_DRAFTS, _DRAFTED = "quire:spec_decode_num_drafts_total", "quire:spec_decode_num_draft_tokens_total"
_BY_POSITION = "quire:spec_decode_num_accepted_tokens_per_pos_total"
_ACCEPTED = "quire:spec_decode_num_accepted_tokens_total"


def dashboard() -> Dashboard:
    """How full KV caches are, what they save, and what drafts save."""
    return Dashboard(
        "quire-kv-cache",
        "Quire / KV cache",
        "How full KV caches are, what prefix caching saves, and what speculative decoding saves.",
        (_now(), _usage(), _prefixes(), _residency(), _speculation()),
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
                title="Prompt tokens by source",
                about="*local_compute*: prefill computes them. *local_cache_hit*: the prefix cache in memory has them. "
                "*external_kv_transfer*: they are read from the disk (`--kv-offloading-disk-size`).",
                lines=(Query(MODELS.rate("quire:prompt_tokens_by_source_total", by="source"), "{{source}}"),),
                colors={"local_compute": "blue", "local_cache_hit": "green", "external_kv_transfer": "purple"},
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
            Lines(
                title="Lost tokens",
                about="Tokens of prompts of models with states that were computed before, and are computed again. "
                "*evicted*: `--state-snapshot-memory` or the KV cache is small. *template_changed*: the client or the "
                "chat template changes earlier messages.",
                lines=(Query(MODELS.rate("quire:prefix_cache_lost_tokens_total", by="reason"), "{{reason}}"),),
                colors={"no_snapshot": "blue", "evicted": "orange", "template_changed": "purple"},
                unit="tokens/s",
                stacked=True,
            ),
        ),
    )


def _residency() -> Row:
    about = "Of the blocks of the prefix cache that are watched (`--kv-cache-metrics-sample`)."
    panels = (
        ("Life until eviction", "lifetime_seconds", "Short: the cache is too small for its prefixes."),
        ("Unused before eviction", "idle_before_evict_seconds", "Short: blocks go that were useful a moment ago."),
        ("Between two uses", "reuse_gap_seconds", "A block that lives for less than this is seldom used again."),
    )
    return Row(
        "Life of cached blocks (--kv-cache-metrics)",
        tuple(latency(title, f"{about} {advice}", f"quire:kv_block_{name}") for title, name, advice in panels),
    )


def _speculation() -> Row:
    accepted = MODELS.rate(_BY_POSITION, by="position")
    return Row(
        "Speculative decoding (--speculative-method)",
        (
            by_model(
                "Accepted",
                "Share of draft tokens.",
                MODELS.share(_ACCEPTED, _DRAFTED, "model_name"),
                "share",
                6,
                maximum=1,
            ),
            by_model(
                "Tokens per verification",
                "One, and the accepted draft tokens.",
                f"1 + {MODELS.share(_ACCEPTED, _DRAFTS, 'model_name')}",
                "tokens",
                6,
            ),
            Lines(
                title="Accepted by position",
                about="Share of drafts whose token at this position was accepted. Where it falls to nothing, shorter "
                "drafts (`--num-speculative-tokens`) cost less.",
                lines=(
                    Query(f"{accepted} / on () group_left () ({MODELS.rate(_DRAFTS)} > 0)", "position {{position}}"),
                ),
                unit="share",
                maximum=1,
                width=6,
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
                width=6,
            ),
        ),
    )
