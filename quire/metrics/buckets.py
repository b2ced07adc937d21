"""Histogram buckets. They are vLLM's, so that its dashboards work, unless --custom-histogram-buckets replaces them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

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
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
RESIDENCY = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    *(5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
SESSION = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
SLEEP = (0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
HTTP = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The upper bounds of the buckets of each family of histograms, without infinity. Families are named as vLLM's."""

    request_latency: Sequence[float] = LATENCY
    time_to_first_token: Sequence[float] = TTFT
    inter_token_latency: Sequence[float] = ITL
    iteration_tokens: Sequence[float] = STEP_TOKENS
    request_params_n: Sequence[float] = ANSWERS
    request_num_preemptions: Sequence[float] = PREEMPTIONS
    request_tokens: Sequence[float]
    kv_cache_residency: Sequence[float] = RESIDENCY

    @classmethod
    def of(cls, custom: Mapping[BucketFamily, Sequence[float]], max_model_len: int) -> Self:
        """Return the default buckets, with those replaced that are set. `max_model_len`: the longest of all models."""
        families: dict[str, Sequence[float]] = {"request_tokens": token_counts(max_model_len), **custom}
        return cls(**families)


def token_counts(maximum: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `maximum`."""
    counts: list[int] = []
    power = 1
    while power <= maximum:
        counts += [power * step for step in (1, 2, 5) if power * step <= maximum]
        power *= 10
    return tuple(counts)
