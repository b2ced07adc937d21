"""Prometheus metrics over HTTP."""

from __future__ import annotations

from pathlib import Path

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import StepStats
from quire.engine.client.stream import PoolRequest
from tests.support.fake_core import FakeCore, prompt_of, says
from tests.support.server import Server, running_server, until

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 400}


async def metrics_of(server: Server) -> dict[str, float]:
    """Samples of the metrics page by name and labels."""
    lines = (await server.http.get("/metrics")).text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


async def test_metrics_count_what_happened(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 10))
    async with running_server(tmp_path, core) as server:
        for _ in range(3):
            await server.post(COMPLETIONS, {"prompt": "abcd", "max_tokens": 5})
        labels = '{engine="0",model_name="fake"}'
        for prefix in ("quire:", "vllm:"):
            metrics = await metrics_of(server)
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
        metrics = await metrics_of(server)
    labels = '{engine="0",model_name="fake"}'
    assert metrics[f"vllm:request_params_n_sum{labels}"] == 3
    assert metrics[f"vllm:request_params_n_count{labels}"] == 1
    assert metrics[f"vllm:request_max_num_generation_tokens_sum{labels}"] == 2
    assert metrics[f"vllm:request_max_num_generation_tokens_count{labels}"] == 1


async def test_the_settings_of_the_cache_are_labels(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        metrics = await metrics_of(server)
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
        names = {line.partition("{")[0] for line in await metrics_of(server)}
    quire, vllm = ({name for name in names if name.startswith(prefix)} for prefix in ("quire:", "vllm:"))
    assert {name.replace("vllm:", "quire:") for name in vllm} < quire
    without = {name for name in quire if name.replace("quire:", "vllm:") not in vllm}
    owned = (
        *("kv_cache_blocks_used", "step_duration_seconds", "engine_restarts", "audio_seconds"),
        *("encoder_cache", "mm_preprocess_seconds", "trace_spans_dropped"),
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
        metrics = await metrics_of(server)
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
        metrics = await metrics_of(server)
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
        metrics = await metrics_of(server)
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
            during = await metrics_of(server)
        after = await metrics_of(server)
    assert (during[by_reason], during[f"quire:num_requests_waiting{labels}"]) == (1, 3)
    assert (after[by_reason], after[f"quire:num_requests_waiting{labels}"]) == (0, 2)
    assert after[f"quire:mm_preprocess_seconds_count{labels}"] == 1
    assert after[f"vllm:mm_cache_queries_total{labels}"] == 2
    assert after[f"vllm:mm_cache_hits_total{labels}"] == 1


async def test_refused_requests_are_counted(tmp_path: Path) -> None:
    core = FakeCore(answer=says("x" * 400))
    core.hold.set()
    name = 'vllm:admission_rejections_total{model_name="fake",reason="max_num_queued_reqs"}'
    async with running_server(tmp_path, core, capacity=1) as server:
        assert (await metrics_of(server))[name] == 0
        with server.state.models[0].client.slots(1):
            assert (await server.post(COMPLETIONS, LONG)).status_code == 503
        assert (await metrics_of(server))[name] == 1


async def test_sleep_is_a_state(tmp_path: Path) -> None:
    async def states() -> list[float]:
        metrics = await metrics_of(server)
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
