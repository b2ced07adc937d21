"""Ranks with the device of GPUs: the tokens are those of the reference device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.build import ranks as rank_build
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.cuda_graphs import GraphSteps
from quire.engine.execution.ranks.workers import rank_process
from tests.support import attention_libraries
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.invariance import mask
from tests.support.models import make_model, save_model
from tests.support.ranks import ThreadRank
from tests.support.triton_device import gpu_device
from tests.support.variants import slow_but

TP = {"tensor_parallel_size": 2}
PP = {"pipeline_parallel_size": 2}
EP = {**TP, "enable_expert_parallel": True}
CASES = [("llama", TP), ("llama", PP), ("qwen3_moe", TP), ("gpt_oss", EP), ("deepseek_v3", EP)]
SHARED = random_prompt(1, 9)
PROMPTS = [SHARED + random_prompt(2, 4), SHARED + random_prompt(3, 2), random_prompt(4, 1)]
PARAMS = [
    greedy(3, logprobs=2),
    SamplingParams(max_tokens=3, temperature=1.0, top_k=20, seed=3, repetition_penalty=1.3),
    greedy(3),
]

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="two ranks need two GPUs"
)


@pytest.fixture(autouse=True)
def ranks_have_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GPUs the ranks are threads, of which one at a time may use Triton's interpreter."""
    if torch.cuda.is_available():
        return
    lock, run = threading.Lock(), interpreter.GridExecutor.__call__

    def run_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        with lock:
            run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_alone)
    monkeypatch.setattr(rank_build, "find_device", lambda _: gpu_device())


@contextmanager
def running(folder: Path, parallel: dict[str, Any], **options: Any) -> Iterator[Engine]:
    engine = Engine(
        folder,
        parallel=ParallelOptions(**parallel),
        device=gpu_device(),
        launch=rank_process if torch.cuda.is_available() else ThreadRank,
        **{"max_num_seqs": 4, "block_size": 4, "max_num_batched_tokens": 8, **options},
    )
    try:
        yield engine
    finally:
        engine.core.close()


@cache
def expected(folder: Path) -> list[list[int]]:
    """The tokens of each request alone on one rank of the reference device."""
    engine = Engine(folder, model=ModelOptions(device="reference"), enable_prefix_caching=False)
    return [engine.generate(prompt, params).tokens for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def together(engine: Engine) -> list[list[int]]:
    """Run all requests, each entering while those before it run."""
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add(f"r{index}", prompt, params)
        engine.step()
    engine.run()
    assert engine.blocks_used == 0
    return [engine.results[f"r{index}"].tokens for index in range(len(PROMPTS))]


@pytest.mark.parametrize(("case", "parallel"), slow_but(CASES, ("llama", TP), ("llama", PP), ("gpt_oss", EP)))
def test_tokens_are_those_of_one_rank(case: str, parallel: dict[str, Any], tmp_path: Path) -> None:
    """In chunks, sampled on the device, with prefix hits in the second run. Collectives are not captured."""
    layers = 1 if case == "llama" and parallel == TP else 2  # two kinds of layers, or one for each stage
    folder = save_model(make_model(case, num_hidden_layers=layers), tmp_path)
    with running(folder, parallel) as engine:
        assert engine.core.executor.max_steps_in_flight == parallel.get("pipeline_parallel_size", 1)
        assert not isinstance(engine.runner.steps, GraphSteps)
        assert together(engine) == expected(folder)
        assert together(engine) == expected(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins of the libraries compute on the CPU")
@pytest.mark.parametrize(("backend", "block_size"), [("flash_attn", 256), ("flashinfer", 4)])
def test_each_rank_attends_with_its_heads_in_a_library(
    backend: str, block_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(make_model("llama", head_dim=64, num_hidden_layers=1), tmp_path)
    attention_libraries.install(monkeypatch)  # now, as transformers looks for the specs of modules
    with running(folder, TP, attention_backend=backend, block_size=block_size) as engine:
        assert together(engine) == expected(folder)


def test_drafts_are_verified_on_the_rank_that_samples(tmp_path: Path) -> None:
    folder = save_model(make_model("llama", num_hidden_layers=1), tmp_path)
    prompt, params = random_prompt(4, 6), greedy(16, allowed_tokens=mask(3, 5))
    with running(folder, TP, speculative_method="ngram", num_speculative_tokens=3) as engine:
        result = engine.generate(prompt, params)
        assert engine.accepted > 0
    assert result.tokens == Engine(folder, model=ModelOptions(device="reference")).generate(prompt, params).tokens


@pytest.mark.parametrize("parallel", [TP, PP], ids=str)
def test_all_ranks_run_the_step_that_measures_memory(parallel: dict[str, Any], tmp_path: Path) -> None:
    folder = save_model(make_model("llama", num_hidden_layers=1 if parallel == TP else 2), tmp_path)
    with running(folder, parallel, kv_cache_memory_bytes=None, gpu_memory_utilization=0.5) as engine:
        assert together(engine) == expected(folder)
