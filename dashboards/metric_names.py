"""The metrics that expressions may name, from the table of `quire.metrics`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from quire.metrics.prometheus import Metrics

_OF_QUIRE = re.compile(r"\b(?:quire:|http_request)\w+")
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


class UnknownMetricError(Exception):
    """An expression names a metric that no server exports."""


def named_in(expressions: Iterable[str]) -> dict[str, str]:
    """Return the metrics of Quire that expressions name, each with its meaning, in the order of their first use.

    Raises:
        UnknownMetricError: no server exports one of them.
    """
    metrics = {}
    for expression in expressions:
        for name in _OF_QUIRE.findall(expression):
            if name not in _exported():
                raise UnknownMetricError(f"{name} in {expression!r} is not in docs/metrics.md")
            metric, meaning = _exported()[name]
            metrics[metric] = meaning
    return metrics


@cache
def _exported() -> dict[str, tuple[str, str]]:
    """The metric and its meaning of each name of a sample."""
    names = {}
    for metric, _ in Metrics(max_model_len=1, vllm_names=False, kv_cache_metrics=True).families():
        for suffix in _SUFFIXES[metric.type]:
            shown = f"{metric.name}_total" if metric.type == "counter" else metric.name
            names[metric.name + suffix] = (shown, metric.documentation)
    return names
