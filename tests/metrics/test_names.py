"""Names, types and labels of all metrics are those of names.txt."""

from __future__ import annotations

from pathlib import Path

from quire.config.options import EngineOptions, MetricsOptions
from quire.engine.client.model_info import Generates
from quire.engine.client.protocol import StepStats
from quire.metrics.model_metrics import ModelMetrics
from quire.metrics.prometheus import Metrics
from tests.support.fake_core import INFO

POLICY = """Names, types or labels of metrics have changed, which dashboards and autoscalers rely on.
A new metric: add its line to tests/metrics/names.txt.
A metric that gets another name, or goes: keep the old one for now, in DEPRECATED of quire/metrics/aliases.py, as the
policy in docs/metrics.md says. A metric never gets another type or other labels: it is a new one then.
Changed lines (-: only in names.txt; +: only in the code):
"""


def exported() -> set[str]:
    """A line for each metric that a server may export: name, type and labels."""
    options = MetricsOptions(show_hidden_metrics_for_version="0.0")
    metrics = Metrics(max_model_len=1, vllm_names=True, options=options, kv_cache_metrics=True)
    model = ModelMetrics(metrics, "model", 0)
    assert isinstance(INFO.kind, Generates)
    model.describe(INFO, EngineOptions(speculative_method="ngram"))
    model.on_step(StepStats())
    model.on_sleep_operation_end("sleep", 1.0)
    metrics.rate_limited.labels("key", "requests").inc()
    metrics.http.requests.labels("GET", "/", "2xx").inc()
    metrics.http.seconds.labels("GET", "/").observe(1.0)
    lines = set[str]()
    for metric in metrics.collect():
        labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        if not name.startswith("process_"):  # of Prometheus' client library
            lines.add(" ".join([name, metric.type, *sorted(labels)]))
    return lines


def test_names_types_and_labels_do_not_change() -> None:
    path = Path(__file__).parent / "names.txt"
    frozen = set(path.read_text(encoding="utf-8").splitlines())
    now = exported()
    changes = [*(f"-{line}" for line in sorted(frozen - now)), *(f"+{line}" for line in sorted(now - frozen))]
    assert not changes, POLICY + "\n".join(changes)
