"""The device of GPUs, under Triton's interpreter where there is no GPU: tokens equal transformers' in any schedule."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.cuda_graphs import GraphSteps
from tests.support import oracle
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.triton_device import gpu_device
from tests.support.variants import slow_but

# Attention: plain, with norms of heads, windowed with softcap, with sinks, latent. Feed-forward: gated, and experts.
CASES = ("llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe")
SHARED = random_prompt(1, 11)
PROMPTS = [SHARED + random_prompt(2, 4), SHARED + random_prompt(3, 2), random_prompt(4, 1), random_prompt(5, 19)]
PARAMS = [
    greedy(5),
    SamplingParams(max_tokens=4, temperature=1.0, top_k=20, seed=3, repetition_penalty=1.3),
    greedy(6, logprobs=2),
    SamplingParams(max_tokens=3, temperature=0.7, top_p=0.9, seed=4),
]
SMALL: dict[str, Any] = {"max_num_seqs": 4, "block_size": 4}


@cache
def save(case: str, folder: Path) -> Path:
    layers = 4 if case == "gemma2" else 2  # every other layer of gemma2 has a window
    return save_model(make_model(case, num_hidden_layers=layers // 2), folder / case)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def expected(folder: Path) -> list[list[int]]:
    """The tokens of each request alone on the CPU's reference device."""
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


@pytest.mark.parametrize("case", slow_but(CASES, "qwen3", "gemma2", "gpt_oss", "deepseek_v3"))
def test_tokens_equal_those_of_transformers(case: str, folders: Path) -> None:
    """Batched, in chunks, padded to one size, with prefix hits in the second run."""
    folder = save(case, folders)
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "cudagraph_capture_sizes": (3,)}
    oracle.assert_equal(folder, PROMPTS[1:], tokens=3, device=gpu_device(), **options)


SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "small chunks, eager": {"max_num_batched_tokens": 7, "max_num_seqs": 3, "enforce_eager": True},
    "padded": {"cudagraph_capture_sizes": (3,), "block_size": 5},
    "speculation": {"speculative_method": "ngram", "num_speculative_tokens": 3},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tokens_do_not_depend_on_the_schedule(schedule: str, folders: Path) -> None:
    folder = save("llama", folders)
    assert together(Engine(folder, device=gpu_device(), **{**SMALL, **SCHEDULES[schedule]})) == expected(folder)


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_keys_and_values_are_written_by_the_kernel_that_rotates(
    case: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by kernels of their own, with norms of heads and without."""
    tokens = expected(save(case, folders))

    def refuse(*_: Any) -> None:
        raise AssertionError("heads and pages are two ops")

    monkeypatch.setattr("quire.engine.execution.attention.paged.write_pages", refuse)
    monkeypatch.setattr("quire.kernels.qk_norm_rope_write.in_two_ops", refuse)
    assert together(Engine(save(case, folders), device=gpu_device(), **SMALL)) == tokens


@pytest.mark.parametrize("case", slow_but(["llama", "deepseek_v3"], "llama"))
def test_tokens_do_not_depend_on_preemption(case: str, folders: Path) -> None:
    """Two sequences grow to seven blocks each, of which there are eight."""
    folder, model = save(case, folders), ModelOptions(max_model_len=28)
    roomy = Engine(folder, model=model, device=gpu_device(), **SMALL)
    engine = Engine(folder, model=model, device=gpu_device(), kv_cache_memory_bytes=8 * roomy.block_bytes, **SMALL)
    params = [greedy(16), SamplingParams(max_tokens=16, temperature=1.0, seed=5, presence_penalty=0.5)]
    on_cpu = Engine(folder, model=ModelOptions(device="reference"), enable_prefix_caching=False)
    for index, param in enumerate(params):
        engine.add(f"r{index}", random_prompt(index, 9), param)
    engine.run()
    for index, param in enumerate(params):
        assert engine.results[f"r{index}"].tokens == on_cpu.generate(random_prompt(index, 9), param).tokens
    assert engine.preemptions > 0
    assert engine.blocks_used == 0


def test_the_next_step_is_submitted_before_tokens_are_known(folders: Path) -> None:
    """Its inputs are the tokens that only the device knows."""
    engine = Engine(save("llama", folders), device=gpu_device(), **SMALL)
    assert engine.core.executor.max_steps_in_flight == 2
    engine.add("r", PROMPTS[0], greedy(5))
    engine.core._submit()
    engine.core._submit()
    row = engine.runner._table.row_of("r")
    assert (engine.runner._table.known_tokens(row)[len(PROMPTS[0]) :] < 0).tolist() == [True, True]
    engine.run()
    assert engine.results["r"].tokens == expected(save("llama", folders))[0]
    assert engine.steps == 5


def test_requests_that_the_host_samples_run_beside_others(folders: Path) -> None:
    """bad_words depend on the tokens before."""
    folder = save("llama", folders)
    greedy_tokens = expected(folder)[0]
    words = ((greedy_tokens[1], greedy_tokens[2]),)
    on_cpu = Engine(folder, model=ModelOptions(device="reference"))
    forbidden = on_cpu.generate(PROMPTS[0], greedy(5, bad_words=words)).tokens
    assert forbidden != greedy_tokens
    engine = Engine(folder, device=gpu_device(), **SMALL)
    engine.add("forbidden", PROMPTS[0], greedy(5, bad_words=words))
    engine.add("other", PROMPTS[0], greedy(5))
    engine.run()
    assert engine.results["forbidden"].tokens == forbidden
    assert engine.results["other"].tokens == greedy_tokens


def test_an_aborted_request_leaves_its_row_to_another(folders: Path) -> None:
    """A token of the aborted one is in flight when the row is filled again."""
    folder = save("llama", folders)
    engine = Engine(folder, device=gpu_device(), **{**SMALL, "max_num_seqs": 1})
    engine.add("aborted", PROMPTS[3], greedy(9))
    engine.step()
    engine.abort("aborted")
    engine.add("next", PROMPTS[0], greedy(5))
    engine.run()
    assert engine.results["next"].tokens == expected(folder)[0]
    assert engine.blocks_used == 0


def test_prompt_logprobs_and_embeddings_are_those_of_the_reference(folders: Path) -> None:
    folder = save("llama", folders)
    on_cpu, engine = (
        Engine(folder, model=ModelOptions(device="reference")),
        Engine(folder, device=gpu_device(), **SMALL),
    )
    params = greedy(2, prompt_logprobs=2)
    for actual, other in zip(
        on_cpu.generate(PROMPTS[0], params).outputs[0].prompt_logprobs or (),
        engine.generate(PROMPTS[0], params).outputs[0].prompt_logprobs or (),
        strict=True,
    ):
        assert actual is None or other is None or actual.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    arrays = []
    for each in (on_cpu, engine):
        pooled = each.generate(PROMPTS[0], PoolingParams(task="embed", pooling_type="mean")).pooled
        assert pooled is not None
        arrays.append(pooled.data)
    assert arrays[1] == pytest.approx(arrays[0], abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["llama", "gemma2", "deepseek_v3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_replayed_graphs_give_the_tokens_of_eager_steps(case: str, dtype: str, folders: Path) -> None:
    folder, results = save(case, folders), []
    for eager in (True, False):
        model = ModelOptions(dtype=dtype)
        engine = Engine(folder, device=gpu_device(), model=model, enforce_eager=eager, **SMALL)
        assert eager or len(engine.runner.steps.graphs) == 3
        assert isinstance(engine.runner.steps, GraphSteps) is not eager
        results.append(together(engine))
    assert results[0] == results[1]


@pytest.mark.gpu
def test_the_cache_takes_the_share_of_the_memory_that_is_asked_for(folders: Path) -> None:
    folder = save("llama", folders)
    before, total = torch.cuda.mem_get_info()  # other tests may run on the GPU, too
    share = 1.05 - before / total
    engine = Engine(
        folder, device=gpu_device(), kv_cache_memory_bytes=None, gpu_memory_utilization=share, max_num_seqs=4096
    )
    assert 0 < engine.info.cache_bytes <= 0.1 * total
    assert engine.generate(PROMPTS[0], greedy(5)).tokens == expected(folder)[0]
