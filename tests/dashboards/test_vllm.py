"""Metrics, labels and buckets that vLLM's dashboards for Grafana ask for, on the page of a Quire.

The names are facts of vLLM 0.33: its dashboards overview, instances, KV cache and speculative decoding, and the older
`grafana.json` and those of performance and queries.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.server import running_server

_ENGINE = {"model_name", "engine"}
_WITH_LABELS = {
    "vllm:num_requests_running": _ENGINE,
    "vllm:num_requests_waiting": _ENGINE,
    "vllm:num_requests_waiting_by_reason": _ENGINE | {"reason"},
    "vllm:kv_cache_usage_perc": _ENGINE,
    "vllm:cache_config_info": {"engine", "num_gpu_blocks", "block_size", "cache_dtype", "enable_prefix_caching"},
    "vllm:engine_sleep_state": _ENGINE | {"sleep_state"},
    "vllm:prompt_tokens_total": _ENGINE,
    "vllm:prompt_tokens_cached_total": _ENGINE,
    "vllm:prompt_tokens_by_source_total": _ENGINE | {"source"},
    "vllm:prompt_tokens_cached_by_source_total": _ENGINE | {"source"},
    "vllm:generation_tokens_total": _ENGINE,
    "vllm:request_success_total": _ENGINE | {"finished_reason"},
    "vllm:num_preemptions_total": _ENGINE,
    "vllm:prefix_cache_hits_total": _ENGINE,
    "vllm:prefix_cache_queries_total": _ENGINE,
    "vllm:mm_cache_hits_total": _ENGINE,
    "vllm:mm_cache_queries_total": _ENGINE,
    "vllm:spec_decode_num_drafts_total": _ENGINE,
    "vllm:spec_decode_num_draft_tokens_total": _ENGINE,
    "vllm:spec_decode_num_accepted_tokens_total": _ENGINE,
    "http_requests_total": {"handler", "method", "status"},
    "process_cpu_seconds_total": set(),
    "process_resident_memory_bytes": set(),
    "process_open_fds": set(),
    "process_max_fds": set(),
    "process_start_time_seconds": set(),
}
_HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds", "iteration_tokens_total"),
    *("request_prompt_tokens", "request_generation_tokens", "request_prefill_kv_computed_tokens"),
    *("request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens"),
)
# Service levels are shares of requests within a bucket, which must have exactly this bound.
_BOUNDS = {
    "vllm:time_to_first_token_seconds": ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"),
    "vllm:request_time_per_output_token_seconds": ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"),
}


async def test_vllms_dashboards_find_their_metrics(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        await server.post("/v1/completions", {"prompt": "abcd", "max_tokens": 2})
        page = (await server.http.get("/metrics")).text
    for name, labels in _WITH_LABELS.items():
        assert labels <= labels_of(page, name), name
    for name in _HISTOGRAMS:
        assert labels_of(page, f"vllm:{name}_bucket") == _ENGINE | {"le"}, name
        assert labels_of(page, f"vllm:{name}_sum") == labels_of(page, f"vllm:{name}_count") == _ENGINE, name
    assert labels_of(page, "http_request_duration_seconds_sum") == {"handler", "method"}
    assert labels_of(page, "http_request_duration_seconds_count") == {"handler", "method"}
    for name, bounds in _BOUNDS.items():
        exported = set(re.findall(rf'^{name}_bucket\{{.*le="([^"]*)"', page, re.MULTILINE))
        assert set(bounds) <= exported, name


def labels_of(page: str, name: str) -> set[str]:
    """The labels of a metric's samples, of which there is one at least."""
    samples = re.findall(rf"^{name}(?:\{{(.*)\}})? ", page, re.MULTILINE)
    assert samples, name
    return {label for sample in samples for label in re.findall(r'(\w+)="', sample)}
