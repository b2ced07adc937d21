"""On several ranks, too, tokens do not depend on batching, chunking, preemption, prefix hits or speculation."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.invariance import alone, mask, together, workload
from tests.support.models import make_model, save_model
from tests.support.parallel import EP, PP, TP, running
from tests.support.variants import covering, slow_but

RANKS = {
    "llama": TP,
    "gpt_oss": EP,
    "deepseek_v3": {**TP, **PP},
    "gemma2": PP,
    "qwen2_moe": EP,
    "deepseek_v2": {**TP, **PP},
    "gemma3n": TP,
    "zamba2": PP,
}
ROUTERS = ("qwen2_moe", "deepseek_v2")  # differ from the others in what chooses and scales experts
QUICK = [case for case in RANKS if case not in ROUTERS]
WITHOUT_STATES = [case for case in RANKS if case != "zamba2"]  # whose cache is blocks alone
SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "small chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "speculation": {"speculative_method": "ngram", "num_speculative_tokens": 5, "block_size": 4},
}


@pytest.fixture(scope="module", params=RANKS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder, and the ranks that run it."""
    return save_model(make_model(request.param), tmp_path_factory.mktemp("model")), RANKS[request.param]


@pytest.mark.parametrize(
    ("model", "schedule"), [*covering(QUICK, SCHEDULES), *slow_but(product(ROUTERS, SCHEDULES))], indirect=["model"]
)
def test_tokens_do_not_depend_on_the_schedule(model: tuple[Path, dict[str, Any]], schedule: str) -> None:
    folder, parallel = model
    with running(folder, parallel, **SCHEDULES[schedule]) as engine:
        assert together(engine, workload(1), 1) == alone(folder, 1)


@pytest.mark.parametrize("model", slow_but(WITHOUT_STATES, "gpt_oss", "deepseek_v3"), indirect=True)
def test_tokens_do_not_depend_on_preemption(model: tuple[Path, dict[str, Any]]) -> None:
    folder, parallel = model
    options = ModelOptions(max_model_len=104)
    with running(folder, parallel, model=options, block_size=4, kv_cache_memory_bytes=1 << 20) as engine:
        ranks = parallel.get("tensor_parallel_size", 1) * parallel.get("pipeline_parallel_size", 1)
        per_block = engine.block_bytes // ranks
    with running(folder, parallel, model=options, block_size=4, kv_cache_memory_bytes=26 * per_block) as engine:
        assert together(engine, workload(3), 3) == alone(folder, 3)
        assert engine.preemptions > 0


def test_drafts_are_verified(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    prompt, params = random_prompt(4, 6), greedy(40, allowed_tokens=mask(3, 5, 9))
    expected = Engine(folder).generate(prompt, params).tokens
    with running(folder, TP, speculative_method="ngram", block_size=4) as engine:
        assert engine.generate(prompt, params).tokens == expected
        assert engine.drafted > 0


@pytest.mark.parametrize("case", slow_but(["qwen3_moe", *ROUTERS, "gemma3n", "zamba2"], "qwen3_moe", "gemma3n"))
def test_bits_in_bfloat16_do_not_depend_on_the_batch(case: str, tmp_path: Path) -> None:
    folder = save_model(make_model(case).bfloat16(), tmp_path)
    options: dict[str, Any] = {"model": ModelOptions(dtype="bfloat16")}
    prompts = [random_prompt(seed, 5 + 7 * seed) for seed in range(5)]
    with running(folder, {"tensor_parallel_size": 2}, **options) as engine:
        single = [engine.generate(prompt, greedy(12, logprobs=3)) for prompt in prompts]
    with running(folder, {"tensor_parallel_size": 2}, **options) as engine:
        for index, prompt in enumerate(prompts):
            engine.add(f"r{index}", prompt, greedy(12, logprobs=3))
        engine.run()
        for index, expected in enumerate(single):
            together_ = engine.results[f"r{index}"]
            assert together_.tokens == expected.tokens
            assert len(expected.outputs) == 12
            for output, expected_output in zip(together_.outputs, expected.outputs, strict=True):
                assert output.logprobs == expected_output.logprobs


def test_the_smallest_cache_of_all_ranks_decides(tmp_path: Path) -> None:
    """Three layers on one rank and two on the other: the first has memory for fewer blocks."""
    folder = save_model(make_model("llama", num_hidden_layers=5), tmp_path)
    three = save_model(make_model("llama", num_hidden_layers=3), tmp_path / "three")
    single = Engine(three, kv_cache_memory_bytes=1 << 20)
    with running(folder, PP, kv_cache_memory_bytes=1 << 20) as engine:
        assert engine.info.num_blocks == single.info.num_blocks
