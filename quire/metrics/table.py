"""Writes docs/metrics.md: `python -m quire.metrics.table > docs/metrics.md`."""

from __future__ import annotations

from prometheus_client import Metric

from quire.metrics.prometheus import Metrics

_HEAD = """# Metrics

`GET /metrics` exports these metrics in Prometheus' text format. Those marked in the column vLLM are also exported with
the prefix `vllm:` instead of `quire:`, unless `--no-vllm-metric-names` is set. Metrics of models have the labels
`model_name` and `engine` (the number of the model in the order of the command line, from 0). A request with `n`
answers, or with several inputs, has that many sequences.

Metrics of the process (`process_*`: memory, CPU time, open files) are those of Prometheus' client library.

| name | type | vLLM | meaning |
|---|---|---|---|
"""
_TAIL = """
This page is written by `python -m quire.metrics.table`; a test keeps it up to date.
"""


def page() -> str:
    """The text of docs/metrics.md."""
    rows = [_row(metric, alias=alias) for metric, alias in Metrics(max_model_len=1, vllm_names=False).families()]
    return "".join([_HEAD, *rows, _TAIL])


def _row(metric: Metric, *, alias: bool) -> str:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    return f"| `{name}` | {metric.type} | {'yes' if alias else ''} | {metric.documentation} |\n"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201 writes the page
