"""Histogram buckets. They are vLLM's, so that its dashboards work, unless --custom-histogram-buckets replaces them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.config.types import BucketFamily

TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ANSWERS = (1, 2, 5, 10, 20)
TRANSFER_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0, 30.0)
TRANSFER_BYTES = tuple(2**power for power in range(11, 35, 2))
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
RESIDENCY = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    *(5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
SESSION = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
SLEEP = (0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
HTTP = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 600.0)


def buckets_by_family(
    custom: Mapping[BucketFamily, Sequence[float]], max_model_len: int
) -> Mapping[BucketFamily, Sequence[float]]:
    """Return the upper bounds of the buckets of each family of histograms, without infinity.

    Args:
        custom: those that replace the default ones.
        max_model_len: the longest context of all models.
    """
    return {
        "request_latency": LATENCY,
        "time_to_first_token": TTFT,
        "inter_token_latency": ITL,
        "iteration_tokens": STEP_TOKENS,
        "request_params_n": ANSWERS,
        "request_num_preemptions": PREEMPTIONS,
        "request_tokens": token_counts(max_model_len),
        "kv_cache_residency": RESIDENCY,
        **custom,
    }


def token_counts(maximum: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `maximum`."""
    counts: list[int] = []
    power = 1
    while power <= maximum:
        counts += [power * step for step in (1, 2, 5) if power * step <= maximum]
        power *= 10
    return tuple(counts)
