"""Deprecated names of metrics, and buckets that the operator chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric

from quire.config.command import ConfigError
from quire.config.commands import Serve
from quire.config.options import MetricsOptions
from quire.metrics.aliases import Deprecated
from quire.metrics.model_metrics import ModelMetrics
from quire.metrics.prometheus import Metrics
from tests.support.scrapes import scrape, values
from tests.support.server import running_server

LABELS = '{engine="0",model_name="fake"}'
OLD = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "vllm:time_per_output_token_seconds_count": "vllm:inter_token_latency_seconds_count",
    "vllm:time_per_output_token_seconds_sum": "vllm:inter_token_latency_seconds_sum",
}
ALWAYS_ZERO = ("vllm:num_requests_swapped", "vllm:cpu_cache_usage_perc")


def metrics_of(*, vllm_names: bool = True, **options: Any) -> list[Metric]:
    """The metrics of a server with one model, without the server."""
    metrics = Metrics(max_model_len=1000, vllm_names=vllm_names, options=MetricsOptions(**options))
    ModelMetrics(metrics, "fake", 0)
    return list(metrics.collect())


async def test_old_names_are_exported_if_asked_for(tmp_path: Path) -> None:
    async with running_server(tmp_path, show_hidden_metrics_for_version="0.9.1") as server:
        await server.post("/v1/completions", {"prompt": "abcd", "max_tokens": 5})
        metrics = await scrape(server)
    numbers, texts = values(metrics), {metric.name: metric.documentation for metric in metrics}
    for old, new in OLD.items():
        assert numbers[old + LABELS] == numbers[new + LABELS], old
    assert numbers[f"vllm:time_per_output_token_seconds_count{LABELS}"] == 4
    assert [numbers[name + LABELS] for name in ALWAYS_ZERO] == [0, 0]
    assert texts["vllm:gpu_prefix_cache_hits"] == "DEPRECATED: use vllm:prefix_cache_hits_total"


def test_a_version_shows_what_was_hidden_in_it_or_later() -> None:
    def old_names(version: str | None, *, vllm_names: bool = True) -> set[str]:
        metrics = metrics_of(vllm_names=vllm_names, show_hidden_metrics_for_version=version)
        return {sample.partition("{")[0] for sample in values(metrics)} & {*OLD, *ALWAYS_ZERO}

    assert old_names(None) == old_names("0.13") == old_names("1.0") == set()
    later = {"vllm:time_per_output_token_seconds_count", "vllm:time_per_output_token_seconds_sum"}
    assert old_names("0.12") == old_names("0.11.2") == later
    assert old_names("0.10") == {*OLD, *ALWAYS_ZERO}
    assert old_names("0.10", vllm_names=False) == set()


def test_a_deprecated_metric_is_shown_until_it_is_hidden() -> None:
    deprecated = Deprecated(name="quire:old", successor="new")
    assert deprecated.is_shown(None)
    hidden = Deprecated(name="quire:old", successor="new", hidden_since="0.3")
    assert [hidden.is_shown(version) for version in (None, "0.2", "0.3.9", "0.4", "1.0")] == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_buckets_can_be_chosen() -> None:
    buckets = {"time_to_first_token": [0.05, 2], "request_tokens": [10, 100], "request_num_preemptions": [0]}
    metrics = metrics_of(custom_histogram_buckets=buckets)
    bounds = {
        metric.name: [sample.labels["le"] for sample in metric.samples if sample.name.endswith("_bucket")]
        for metric in metrics
    }
    assert bounds["vllm:time_to_first_token_seconds"] == ["0.05", "2.0", "+Inf"]
    assert (
        bounds["quire:request_generation_tokens"] == bounds["vllm:request_prompt_tokens"] == ["10.0", "100.0", "+Inf"]
    )
    assert bounds["quire:request_num_preemptions"] == ["0.0", "+Inf"]
    assert len(bounds["quire:e2e_request_latency_seconds"]) == 22


@pytest.mark.parametrize(
    "buckets",
    [
        *({"unknown": [1]}, {"request_latency": []}, {"request_latency": [2, 1]}, {"request_latency": [1, 1]}),
        *({"request_latency": [-1]}, {"request_latency": ["x"]}, {"request_latency": 1}, [1]),
        {"request_latency": list(range(101))},
    ],
    ids=lambda buckets: str(buckets)[:40],
)
def test_wrong_buckets_are_refused_at_start(buckets: Any) -> None:
    with pytest.raises(
        ConfigError, match="--custom-histogram-buckets expects a JSON object of lists of 1 to 100 ascending"
    ):
        Serve.parse(["--custom-histogram-buckets", json.dumps(buckets)])


@pytest.mark.parametrize("value", ['{"request_latency": [NaN]}', '{"request_latency": [Infinity]}', "{"])
def test_numbers_that_are_none_are_refused_as_buckets(value: str) -> None:
    with pytest.raises(ConfigError, match="--custom-histogram-buckets expects"):
        Serve.parse(["--custom-histogram-buckets", value])


def test_buckets_may_be_given_one_by_one() -> None:
    settings = Serve.parse(["--custom-histogram-buckets.request_latency", "[0.5, 1]"])
    assert settings.custom_histogram_buckets == {"request_latency": (0.5, 1.0)}
    assert Serve.parse(["--show-hidden-metrics-for-version=0.12"]).show_hidden_metrics_for_version == "0.12"
