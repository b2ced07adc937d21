"""The device of GPUs, under Triton's interpreter where there is no GPU: tokens equal transformers' in any schedule."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from quire.engine.wire.protocol import SamplingParams
from tests.support import oracle
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.triton_device import gpu_device

# Attention: plain, with norms of heads, windowed with softcap, with sinks, latent. Feed-forward: gated, and experts.
CASES = {
    "llama": {},
    "qwen3": {},
    "gemma2": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "qwen3_moe": {},
}
SHARED = random_prompt(1, 21)
PROMPTS = [SHARED + random_prompt(2, 9), SHARED + random_prompt(3, 2), random_prompt(4, 1), random_prompt(5, 33)]
PARAMS = [
    greedy(7),
    SamplingParams(max_tokens=6, temperature=1.0, top_k=20, seed=3, repetition_penalty=1.3),
    greedy(9),
    SamplingParams(max_tokens=5, temperature=0.7, top_p=0.9, seed=4),
]


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model(request.param, num_hidden_layers=2, **CASES[request.param])
    return save_model(model, tmp_path_factory.mktemp("model"))


@cache
def expected(folder: Path) -> list[list[int]]:
    """The tokens of each request alone on the CPU's reference device."""
    engine = Engine(folder, model=ModelOptions(device="reference"), enable_prefix_caching=False)
    return [engine.generate(prompt, params).tokens for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def together(engine: Engine) -> list[list[int]]:
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add(f"r{index}", prompt, params)
        engine.step()
    engine.run()
    assert engine.blocks_used == 0
    return [engine.results[f"r{index}"].tokens for index in range(len(PROMPTS))]


def test_tokens_equal_those_of_transformers(folder: Path) -> None:
    oracle.assert_equal(folder, PROMPTS[:3], tokens=4, device=gpu_device())


SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "small chunks, eager": {"max_num_batched_tokens": 7, "max_num_seqs": 3, "enforce_eager": True},
    "padded to few sizes": {"cudagraph_capture_sizes": (3, 4), "block_size": 5, "max_num_seqs": 4},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tokens_do_not_depend_on_the_schedule(folder: Path, schedule: str) -> None:
    options = {"max_num_seqs": 4, **SCHEDULES[schedule]}
    assert together(Engine(folder, device=gpu_device(), **options)) == expected(folder)


def test_tokens_do_not_depend_on_preemption(folder: Path) -> None:
    model = ModelOptions(max_model_len=64)
    roomy = Engine(folder, model=model, device=gpu_device(), block_size=4, max_num_seqs=4)
    per_block = roomy.info.cache_bytes // roomy.info.num_blocks
    engine = Engine(
        folder,
        model=model,
        device=gpu_device(),
        block_size=4,
        kv_cache_memory_bytes=16 * per_block,
        max_num_seqs=4,
        cudagraph_capture_sizes=(4,),
    )
    assert together(engine) == expected(folder)
    assert engine.preemptions > 0
