"""Names of metrics beside Quire's own: those of vLLM, and deprecated ones.

A metric is renamed or removed in three steps, as in vLLM: it is deprecated, which its help text says; in a later
release it is hidden, and exported only with --show-hidden-metrics-for-version; in a still later one it is gone. The
table `DEPRECATED` has those of the first two steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.samples import Sample

PREFIX, VLLM_PREFIX = "quire:", "vllm:"
# Metrics that vLLM does not have.
_QUIRE_ONLY = frozenset(
    (
        "kv_offload_used_bytes",
        "kv_offload_unwritten_blocks",
        "kv_transfer_held_blocks",
        *("prefix_cache_lost_tokens", "state_snapshot_bytes", "state_snapshot_hits"),
        *("state_snapshots_saved", "state_snapshots_evicted"),
        *("kv_cache_blocks_used", "step_duration_seconds", "engine_restarts", "audio_seconds"),
        *(
            "encoder_cache_queries",
            "encoder_cache_hits",
            "mm_preprocess_seconds",
            "grammar_check_seconds",
            "trace_spans_dropped",
            "rate_limited_requests",
        ),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deprecated:
    """A metric that has another name now, or nothing to count any more.

    Attributes:
        name: with its prefix; of counters without `_total`.
        successor: the metric that replaces it, without prefix.
        is_zero: it is always 0, as what it counted does not exist in Quire; else it is equal to its successor.
        hidden_since: the version, of vLLM if the name begins with `vllm:`, in which it was hidden; None: it is not yet.
    """

    name: str
    successor: str
    is_zero: bool = False
    hidden_since: str | None = None

    def is_shown(self, version: str | None) -> bool:
        """Return whether it is exported with this value of --show-hidden-metrics-for-version."""
        if self.hidden_since is None:
            return True
        return version is not None and _numbers(version) <= _numbers(self.hidden_since)


# vLLM has removed all of these; routers, autoscalers and dashboards that were written before still read them.
DEPRECATED: tuple[Deprecated, ...] = (
    Deprecated(name="vllm:gpu_cache_usage_perc", successor="kv_cache_usage_perc", hidden_since="0.10"),
    Deprecated(name="vllm:gpu_prefix_cache_queries", successor="prefix_cache_queries", hidden_since="0.10"),
    Deprecated(name="vllm:gpu_prefix_cache_hits", successor="prefix_cache_hits", hidden_since="0.10"),
    Deprecated(name="vllm:time_per_output_token_seconds", successor="inter_token_latency_seconds", hidden_since="0.12"),
    Deprecated(name="vllm:num_requests_swapped", successor="num_preemptions", is_zero=True, hidden_since="0.10"),
    Deprecated(name="vllm:cpu_cache_usage_perc", successor="kv_cache_usage_perc", is_zero=True, hidden_since="0.10"),
)


class Aliases:
    """Make metrics under other names from those under Quire's."""

    def __init__(self, *, vllm_names: bool, hidden_version: str | None) -> None:
        """Choose the names.

        Args:
            vllm_names: those of vLLM as well.
            hidden_version: the value of --show-hidden-metrics-for-version.
        """
        self._vllm_names = vllm_names
        self._deprecated: dict[str, list[Deprecated]] = {}
        for entry in DEPRECATED:
            if entry.is_shown(hidden_version) and (vllm_names or not entry.name.startswith(VLLM_PREFIX)):
                self._deprecated.setdefault(PREFIX + entry.successor, []).append(entry)

    def of(self, metric: Metric) -> Iterator[Metric]:
        """Return a metric under its other names."""
        if self._vllm_names and is_in_vllm(metric.name):
            name = VLLM_PREFIX + metric.name.removeprefix(PREFIX)
            yield _renamed(metric, name, metric.documentation, metric.type, metric.samples)
        for entry in self._deprecated.get(metric.name, ()):
            yield _deprecated_metric(entry, metric)


def is_in_vllm(name: str) -> bool:
    """Return whether vLLM has the metric of this name as well."""
    return name.removeprefix(PREFIX) not in _QUIRE_ONLY


def _deprecated_metric(entry: Deprecated, successor: Metric) -> Metric:
    """Return a deprecated metric, made from its successor."""
    help_text = f"DEPRECATED: use {wire_name(successor_name(entry), successor.type)}"
    if not entry.is_zero:
        return _renamed(successor, entry.name, help_text, successor.type, successor.samples)
    counts = [sample for sample in successor.samples if not sample.name.endswith("_created")]
    zero = Metric(entry.name, f"{help_text}; always 0", "gauge")
    zero.samples = [Sample(entry.name, sample.labels, 0.0) for sample in counts]
    return zero


def successor_name(entry: Deprecated) -> str:
    """Return the name of the metric to use instead of a deprecated one, with the same prefix."""
    return entry.name.partition(":")[0] + ":" + entry.successor


def wire_name(name: str, kind: str) -> str:
    """Return the name of a metric in queries; `kind`: its type."""
    return f"{name}_total" if kind == "counter" else name


def _renamed(metric: Metric, name: str, help_text: str, kind: str, samples: Sequence[Sample]) -> Metric:
    """Return a metric with the samples of another one."""
    copy = Metric(name, help_text, kind)
    copy.samples = [Sample(name + sample.name.removeprefix(metric.name), *sample[1:]) for sample in samples]
    return copy


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))[:2]
