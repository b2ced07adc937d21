"""Why requests are slow: where their time goes, and what limits the engine."""

from __future__ import annotations

from dashboards.boards.common import (
    DECODE,
    E2E,
    GRAMMAR,
    ITL,
    KV_USAGE,
    PREFILL,
    PREPARATION,
    QUEUE,
    STEP_SECONDS,
    TTFT,
    by_model,
    hits,
    latency,
    preemptions,
    running_and_waiting,
)
from dashboards.panels import Color, Dashboard, Heatmap, Lines, Query, Row, Text
from dashboards.promql import MODELS, ratio

_INFERENCE = "quire:request_inference_time_seconds"
_PHASES: tuple[tuple[str, str, Color], ...] = (
    ("media", PREPARATION, "purple"),
    ("grammar", GRAMMAR, "yellow"),
    ("queue", QUEUE, "orange"),
    ("prefill", PREFILL, "blue"),
    ("decode", DECODE, "green"),
)
_COARSE = "Below 0.3 s all but *media* and *grammar* are guesses, as there is one bucket; the mean is exact."
_READING = """**Which part of the first panel is large?**

- **media**: pictures, videos or files are fetched, decoded and prepared. See *Quire / Media*.
- **grammar**: schemas and grammars of structured outputs are checked before the engine sees them.
- **queue**: sequences wait for the engine. *KV cache* near 1: the cache is too small for so many sequences. \
*Engine busy* near 1: the machine is too slow for the load. Neither: `--max-num-seqs` is too low.
- **prefill**: long prompts, or many at once. Do prompts share a beginning? Then see *Prefix cache hits*.
- **decode**: many tokens, or slow ones. *Time per output token* tells them apart; it grows with *Tokens per step* \
and with preemptions.
- **send**: clients read slowly, or the event loop of the server is busy."""


def dashboard() -> Dashboard:
    """The time of requests by phase, and the resources that they wait for."""
    return Dashboard(
        "quire-why-slow",
        "Quire / Why was it slow",
        "Where the time of requests goes, and what limits it. A point on a line of p95 is the trace of one request, "
        "where traces are collected.",
        (_phases(), _limits(), _requests(), _distributions()),
    )


def _phases() -> Row:
    sequences = MODELS.rate(f"{E2E}_count")
    total, media, grammar, queue, inference, decode = (
        MODELS.rate(f"{histogram}_sum") for histogram in (E2E, PREPARATION, GRAMMAR, QUEUE, _INFERENCE, DECODE)
    )
    mean = (
        Query(ratio(media, sequences), "media", "purple"),
        Query(ratio(grammar, sequences), "grammar", "yellow"),
        Query(ratio(queue, sequences), "queue", "orange"),
        Query(ratio(f"({inference} - {decode})", sequences), "prefill", "blue"),
        Query(ratio(decode, sequences), "decode", "green"),
        Query(ratio(f"clamp_min({total} - {queue} - {inference}, 0)", sequences), "send", "gray"),
    )
    return Row(
        "Where the time goes",
        (
            Lines(
                title="Mean time of a sequence",
                about="The phases of a mean sequence add up to its whole time. Embeddings and other pooled inputs are "
                "*prefill* alone. *send*: from the last token until the client has read it all.",
                lines=mean,
                unit="seconds",
                stacked=True,
                height=9,
            ),
            _quantiles(
                0.5,
                "Half of all sequences need less for a phase. *media* and *grammar* are of requests that have some.",
            ),
            _quantiles(
                0.95,
                "95 % of sequences need less for a phase. A sequence is rarely slow in all of them: their sum is more "
                "than the whole time's p95.",
            ),
            Text(title="How to read this", about=_READING, height=8),
        ),
    )


def _quantiles(quantile: float, about: str) -> Lines:
    lines = tuple(Query(MODELS.quantile(quantile, histogram), name, color) for name, histogram, color in _PHASES)
    title = f"Phases, p{quantile * 100:.0f}"
    about = f"{about} {_COARSE}"
    return Lines(title=title, about=about, lines=lines, unit="seconds", stacked=True, height=9)


def _limits() -> Row:
    return Row(
        "What limits",
        (
            Lines(
                title="Limits",
                about="What is near 1 limits. *Engine busy*: share of time in which the engine runs steps. *KV "
                "cache*: share of blocks in use. Both of the model that has most.",
                lines=(
                    Query(MODELS.busiest_rate(STEP_SECONDS), "engine busy", "blue"),
                    Query(MODELS.max(KV_USAGE), "KV cache", "orange"),
                ),
                unit="share",
                maximum=1,
            ),
            running_and_waiting(),
            preemptions(),
            Lines(
                title="Tokens per step",
                about="Size of the batch: tokens of prompts and answers in a step of the engine. At "
                "`--max-num-batched-tokens`, prompts wait for each other.",
                lines=(
                    Query(MODELS.mean("quire:iteration_tokens_total"), "mean", "gray"),
                    Query(MODELS.quantile(0.95, "quire:iteration_tokens_total"), "p95", "p95"),
                ),
                unit="tokens",
            ),
            latency(
                "Step duration", "A token of every running sequence takes one step.", "quire:step_duration_seconds"
            ),
            by_model(
                "Refused because of the queue",
                "Requests that were refused as too many sequences ran or waited (`--max-num-queued-seqs`, "
                "`--max-client-share`).",
                MODELS.rate("quire:admission_rejections_total", by="model_name"),
                "requests/s",
            ),
        ),
    )


def _requests() -> Row:
    return Row(
        "What is asked for",
        (
            latency("Prompt tokens", "Of a sequence.", "quire:request_prompt_tokens", 6, "tokens"),
            latency("Generated tokens", "Of a sequence.", "quire:request_generation_tokens", 6, "tokens"),
            latency(
                "Time per output token",
                "Mean of a sequence, without its first token.",
                "quire:request_time_per_output_token_seconds",
                6,
            ),
            hits("Prefix cache hits", "Share of the looked-up prompt tokens that need no prefill.", "prefix_cache", 6),
        ),
    )


def _distributions() -> Row:
    return Row(
        "Distributions",
        tuple(
            Heatmap(
                title=title,
                about="Observations per second in each bucket. Two bands are two kinds of requests.",
                expression=MODELS.rate(f"{histogram}_bucket", by="le"),
                unit="seconds",
            )
            for title, histogram in (("Time to first token", TTFT), ("Inter-token latency", ITL), ("End to end", E2E))
        ),
    )
