"""Prometheus metrics over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.options import EngineOptions
from quire.engine.client.errors import TenantOverloaded
from quire.engine.client.origin import Origin
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import BlockLife, StepStats
from quire.engine.client.records import RequestRecord
from quire.engine.client.stream import PoolRequest
from quire.engine.client.timeline import RequestTimes
from quire.metrics.model_metrics import ModelMetrics
from quire.metrics.prometheus import Metrics
from tests.support.fake_core import INFO, FakeCore, prompt_of, says, says_in_turn
from tests.support.scrapes import values, values_of
from tests.support.server import running_server, until

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 400}


async def test_metrics_count_what_happened(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 10))
    async with running_server(tmp_path, core) as server:
        for _ in range(3):
            await server.post(COMPLETIONS, {"prompt": "abcd", "max_tokens": 5})
        labels = '{engine="0",model_name="fake"}'
        for prefix in ("quire:", "vllm:"):
            metrics = await values_of(server)
            expected = {
                "prompt_tokens_total": 12,
                "generation_tokens_total": 15,
                "time_to_first_token_seconds_count": 3,
                "inter_token_latency_seconds_count": 12,
                "e2e_request_latency_seconds_count": 3,
                "request_queue_time_seconds_count": 3,
                "request_prefill_time_seconds_count": 3,
                "request_decode_time_seconds_count": 3,
                "request_inference_time_seconds_count": 3,
                "request_time_per_output_token_seconds_count": 3,
                "request_prompt_tokens_sum": 12,
                "request_generation_tokens_sum": 15,
                "request_params_max_tokens_sum": 15,
                "request_params_n_count": 3,
                "request_prefill_kv_computed_tokens_sum": 12,
                "request_max_num_generation_tokens_sum": 15,
                "prompt_tokens_cached_total": 0,
                "iteration_tokens_total_sum": 15,
                "iteration_tokens_total_count": 15,
                "request_num_preemptions_count": 3,
                "request_num_preemptions_sum": 0,
            }
            for name, value in expected.items():
                assert metrics[f"{prefix}{name}{labels}"] == value, name
            ended = f'{prefix}request_success_total{{engine="0",finished_reason="length",model_name="fake"}}'
            assert metrics[ended] == 3
        handled = 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'
        assert metrics[handled] == 3


async def test_n_is_counted_once_for_each_request(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        await server.post(COMPLETIONS, {"prompt": "abcd", "max_tokens": 2, "n": 3})
        metrics = await values_of(server)
    labels = '{engine="0",model_name="fake"}'
    assert metrics[f"vllm:request_params_n_sum{labels}"] == 3
    assert metrics[f"vllm:request_params_n_count{labels}"] == 1
    assert metrics[f"vllm:request_max_num_generation_tokens_sum{labels}"] == 2
    assert metrics[f"vllm:request_max_num_generation_tokens_count{labels}"] == 1


async def test_the_settings_of_the_cache_are_labels(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        metrics = await values_of(server)
    (line,) = [line for line in metrics if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="16"' in line
    assert 'num_gpu_blocks="1024"' in line
    assert 'model_name="fake"' in line
    assert 'kv_cache_free_memory_fraction="0.5"' in line
    assert "gpu_memory_utilization" not in line
    assert metrics[line] == 1


async def test_only_metrics_of_vllm_have_its_prefix(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        await server.post(COMPLETIONS, {"prompt": "abcd", "max_tokens": 2})
        names = {line.partition("{")[0] for line in await values_of(server)}
    quire, vllm = ({name for name in names if name.startswith(prefix)} for prefix in ("quire:", "vllm:"))
    assert {name.replace("vllm:", "quire:") for name in vllm} < quire
    without = {name for name in quire if name.replace("quire:", "vllm:") not in vllm}
    owned = (
        *("kv_cache_blocks_used", "step_duration_seconds", "engine_restarts", "audio_seconds"),
        *("encoder_cache", "mm_preprocess_seconds", "grammar_check_seconds", "trace_spans_dropped"),
        *("kv_offload_used_bytes", "kv_offload_unwritten_blocks", "prefix_cache_lost_tokens", "state_snapshot"),
    )
    assert all(name.removeprefix("quire:").startswith(owned) for name in without)
    assert {"quire:kv_cache_blocks_used", "quire:step_duration_seconds_count"} <= without


async def test_metrics_return_to_nothing_after_clients_left(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 400))
    core.hold.set()
    core.allow(1)
    async with running_server(tmp_path, core) as server:
        async with server.http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as answer:
            await anext(answer.aiter_bytes())
        await until(lambda: not core.active)
        metrics = await values_of(server)
        assert metrics['quire:request_success_total{engine="0",finished_reason="abort",model_name="fake"}'] == 1


async def test_metrics_under_quires_names_only(tmp_path: Path) -> None:
    async with running_server(tmp_path, vllm_metric_names=False) as server:
        answer = await server.http.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        page = answer.text
        assert "quire:" in page
        assert "vllm:" not in page


async def test_pooled_requests_are_counted_without_token_times(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore()) as server:
        request = PoolRequest(prompt=prompt_of("abcd"), params=PoolingParams(task="embed"))
        await server.state.models[0].client.pool(request)
        metrics = await values_of(server)
    labels = '{engine="0",model_name="fake"}'
    assert metrics['quire:request_success_total{engine="0",finished_reason="stop",model_name="fake"}'] == 1
    assert metrics[f"quire:prompt_tokens_total{labels}"] == 4
    for name in ("e2e_request_latency", "request_queue_time", "request_inference_time"):
        assert metrics[f"quire:{name}_seconds_count{labels}"] == 1
    for name in ("time_to_first_token", "request_prefill_time", "request_decode_time"):
        assert metrics[f"quire:{name}_seconds_count{labels}"] == 0


async def test_waiting_sequences_are_counted_by_reason(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        server.state.models[0].client.observers.on_step(StepStats(running=1, waiting=5, deferred=2))
        metrics = await values_of(server)
    by_reason = 'vllm:num_requests_waiting_by_reason{{engine="0",model_name="fake",reason="{}"}}'
    assert [metrics[by_reason.format(reason)] for reason in ("capacity", "deferred")] == [3, 2]
    assert metrics['vllm:num_requests_waiting{engine="0",model_name="fake"}'] == 5


async def test_requests_that_wait_for_their_media_are_counted(tmp_path: Path) -> None:
    labels = '{engine="0",model_name="fake"}'
    by_reason = 'quire:num_requests_waiting_by_reason{engine="0",model_name="fake",reason="preprocessing"}'
    async with running_server(tmp_path) as server:
        observers = server.state.models[0].client.observers
        observers.on_step(StepStats(waiting=2))
        with observers.preprocessing():
            observers.on_media_lookup(False)
            observers.on_media_lookup(True)
            during = await values_of(server)
        after = await values_of(server)
    assert (during[by_reason], during[f"quire:num_requests_waiting{labels}"]) == (1, 3)
    assert (after[by_reason], after[f"quire:num_requests_waiting{labels}"]) == (0, 2)
    assert after[f"quire:mm_preprocess_seconds_count{labels}"] == 1
    assert after[f"vllm:mm_cache_queries_total{labels}"] == 2
    assert after[f"vllm:mm_cache_hits_total{labels}"] == 1


async def test_requests_that_wait_for_their_grammar_are_counted(tmp_path: Path) -> None:
    labels = '{engine="0",model_name="fake"}'
    by_reason = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="fake",reason="grammar"}'
    async with running_server(tmp_path) as server:
        with server.state.models[0].client.observers.checking_grammar():
            during = await values_of(server)
        after = await values_of(server)
    assert (during[by_reason], during[f"quire:num_requests_waiting{labels}"]) == (1, 1)
    assert (after[by_reason], after[f"quire:num_requests_waiting{labels}"]) == (0, 0)
    assert after[f"quire:grammar_check_seconds_count{labels}"] == 1


@pytest.mark.slow  # starts worker processes
async def test_the_grammar_of_a_request_is_timed(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"choice": ["a", "b"]}}
        assert (await server.post(COMPLETIONS, body)).status_code == 200
        metrics = await values_of(server)
    assert metrics['quire:grammar_check_seconds_count{engine="0",model_name="fake"}'] == 1


async def test_prompt_tokens_are_counted_by_source(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        await server.post(COMPLETIONS, {"prompt": "x" * 20, "max_tokens": 1})  # the core says that 16 were cached
        metrics = await values_of(server)
    by_source = 'vllm:prompt_tokens_by_source_total{{engine="0",model_name="fake",source="{}"}}'
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert [metrics[by_source.format(source)] for source in sources] == [4, 16, 0]
    cached = 'vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="fake",source="device"}'
    assert metrics[cached] == metrics['vllm:prompt_tokens_cached_total{engine="0",model_name="fake"}'] == 16


def test_accepted_drafts_are_counted_by_position() -> None:
    name = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="fake",position="{}"}}'
    metrics = Metrics(max_model_len=1, vllm_names=True)
    model = ModelMetrics(metrics, "fake", 0)
    model.describe(INFO, EngineOptions(speculative_method="ngram", num_speculative_tokens=3))
    assert [values(metrics.collect())[name.format(position)] for position in range(3)] == [0, 0, 0]
    for accepted in ([2, 1], [1], []):
        model.on_step(StepStats(accepted_per_position=accepted))
    assert [values(metrics.collect())[name.format(position)] for position in range(3)] == [3, 1, 0]


def test_events_are_counted_whether_many_of_them_have_come_or_few() -> None:
    metrics = Metrics(max_model_len=1, vllm_names=False)
    model = ModelMetrics(metrics, "fake", 0)
    labels = '{engine="0",model_name="fake"}'
    times = RequestTimes(queued=1.0, scheduled=1.5, first_token=2.0, last_token=3.0, sent=4.0)
    record = RequestRecord(
        request_id="one",
        origin=Origin(),
        kind="generate",
        times=times,
        finish_reason="stop",
        prompt_tokens=7,
        cached_tokens=2,
        output_tokens=3,
    )
    for number in range(1, 101):
        model.on_tokens(Origin(), times, 3.5, 2)
        model.on_step(StepStats(running=number, step_tokens=2, step_seconds=0.5))
        model.on_finish(record)
        if number in (1, 99, 100):
            samples = values(metrics.collect())
            expected = {
                "num_requests_running": number,
                "generation_tokens_total": 2 * number,
                "inter_token_latency_seconds_sum": 0.5 * number,
                "step_duration_seconds_sum": 0.5 * number,
                "prompt_tokens_total": 7 * number,
                "e2e_request_latency_seconds_count": number,
                "e2e_request_latency_seconds_sum": 3 * number,
                "request_time_per_output_token_seconds_sum": 0.5 * number,
            }
            assert {name: samples[f"quire:{name}{labels}"] for name in expected} == expected


@pytest.mark.parametrize("kv_cache_metrics", [True, False])
def test_the_residency_of_blocks_is_measured_if_asked_for(kv_cache_metrics: bool) -> None:
    metrics = Metrics(max_model_len=1, vllm_names=True, kv_cache_metrics=kv_cache_metrics)
    evicted = [BlockLife(9.0, 4.0), BlockLife(1.0, 0.5)]
    ModelMetrics(metrics, "fake", 0).on_step(StepStats(evicted_blocks=evicted, block_reuse_gaps=[0.2]))
    samples = values(metrics.collect())
    name = 'vllm:kv_block_{}_seconds_sum{{engine="0",model_name="fake"}}'
    sums = [samples.get(name.format(kind)) for kind in ("lifetime", "idle_before_evict", "reuse_gap")]
    assert sums == ([10.0, 4.5, 0.2] if kv_cache_metrics else [None, None, None])


def test_saved_states_and_lost_tokens_are_counted() -> None:
    metrics = Metrics(max_model_len=1, vllm_names=True)
    model = ModelMetrics(metrics, "fake", 0)
    model.on_step(StepStats(lost_tokens={"evicted": 32}, snapshots_saved=2, snapshot_hits=1, snapshot_bytes=4096))
    model.on_step(StepStats(lost_tokens={"evicted": 16}, snapshots_evicted=3, snapshot_bytes=8192))
    samples, labels = values(metrics.collect()), 'engine="0",model_name="fake"'
    lost = {
        reason: samples[f'quire:prefix_cache_lost_tokens_total{{{labels},reason="{reason}"}}']
        for reason in ("evicted", "no_snapshot", "template_changed")
    }
    assert lost == {"evicted": 48, "no_snapshot": 0, "template_changed": 0}
    names = ("state_snapshots_saved_total", "state_snapshot_hits_total", "state_snapshots_evicted_total")
    assert [samples[f"quire:{name}{{{labels}}}"] for name in names] == [2, 1, 3]
    assert samples[f"quire:state_snapshot_bytes{{{labels}}}"] == 8192


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'


async def test_searches_for_tool_calls_are_counted(tmp_path: Path) -> None:
    """As in vLLM: each answer, or each piece of one that streams."""
    name = 'vllm:tool_call_parser_invocations_total{{mode="{}",model_name="fake",outcome="{}",request_type="{}"}}'

    async def counts(mode: str, request_type: str) -> list[float]:
        metrics = await values_of(server)
        return [metrics[name.format(mode, outcome, request_type)] for outcome in ("tool_call", "no_tool_call")]

    template = "{{ messages[0].content }}{{ tools }}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    flat = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    answer = FakeCore(answer=says_in_turn(CALL, "none", f"Hm. {CALL}", CALL, CALL))
    async with running_server(tmp_path, answer, chat_template=template, tool_call_parser="hermes") as server:
        assert await counts("non_streaming", "chat_completions") == [0, 0]
        for _ in range(2):
            await server.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
        assert await counts("non_streaming", "chat_completions") == [1, 1]
        await server.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS, "stream": True})
        called, _ = await counts("streaming", "chat_completions")  # pieces that come together are one
        assert called >= 1
        await server.post("/v1/responses", {"input": "x", "tools": flat, "store": False})
        assert await counts("non_streaming", "responses") == [1, 0]
        await server.post("/v1/chat/completions", {"messages": messages})  # nothing is searched for
        assert await counts("non_streaming", "chat_completions") == [1, 1]


async def test_refused_requests_are_counted(tmp_path: Path) -> None:
    name = 'vllm:admission_rejections_total{{model_name="fake",reason="{}"}}'
    by_reason = [name.format(reason) for reason in ("max_num_queued_reqs", "max_client_share")]
    async with running_server(tmp_path, capacity=4, max_client_share=0.5) as server:
        metrics = await values_of(server)
        assert [metrics[name] for name in by_reason] == [0, 0]
        slots = server.state.models[0].client.slots
        with slots(2, "one"), slots(1, "two"):
            with pytest.raises(TenantOverloaded), slots(1, "one"):
                pass
            with slots(1, "three"):
                assert (await server.post(COMPLETIONS, LONG)).status_code == 503
        metrics = await values_of(server)
    assert [metrics[name] for name in by_reason] == [1, 1]


async def test_sleep_is_a_state(tmp_path: Path) -> None:
    async def states() -> list[float]:
        metrics = await values_of(server)
        name = 'vllm:engine_sleep_state{{engine="0",model_name="fake",sleep_state="{}"}}'
        return [metrics[name.format(state)] for state in ("awake", "weights_offloaded", "discard_all")]

    async with running_server(tmp_path, enable_sleep_mode=True) as server:
        assert await states() == [1, 0, 0]
        await server.post("/sleep")
        assert await states() == [0, 1, 0]
        await server.post("/sleep?level=2")
        assert await states() == [0, 0, 1]
        await server.post("/sleep?level=1")  # of two levels, the deeper one counts
        assert await states() == [0, 0, 1]
        server.state.models[0].client.observers.on_sleep(frozenset({"kv_cache"}), 2)  # the weights are awake
        assert await states() == [0, 0, 0]
        await server.post("/wake_up")
        assert await states() == [1, 0, 0]
        metrics = await values_of(server)
    name = 'vllm:sleep_mode_operation{}{{engine="0",model_name="fake",operation="{}"}}'
    assert [metrics[name.format("_duration_seconds_count", operation)] for operation in ("sleep", "wake")] == [3, 1]
    assert [metrics[name.format("s_in_flight", operation)] for operation in ("sleep", "wake")] == [0, 0]
