"""Tokens that attend within chunks or to selected ones on GPUs, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.triton_device import gpu_device

PROMPTS = [random_prompt(1, 19), random_prompt(2, 3)]  # of which 8 tokens are selected


SHAPES: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"index_topk": 8},
    "llama4": {"attention_chunk_size": 8, "layer_types": ["chunked_attention"] * 2 + ["full_attention"]},
}


GRAPHS: dict[str, Any] = {"max_num_batched_tokens": 16, "cudagraph_capture_sizes": (2,)}


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("glm_moe_dsa", GRAPHS),
        pytest.param("llama4", GRAPHS, marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", {"enforce_eager": True}, marks=pytest.mark.slow),
        ("llama4", {"enforce_eager": True}),
    ],
)
def test_tokens_equal_those_of_the_reference_device(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    """In chunks of prompts beside sequences that decode, padded to one size, with prefix hits."""
    model = make_model(case, **SHAPES[case])
    folder = save_model(model, tmp_path)
    reference = Engine(folder, model=ModelOptions(device="reference"), block_size=4, enable_prefix_caching=False)
    expected = [reference.generate(prompt, greedy(3)).tokens for prompt in PROMPTS]
    engine = Engine(folder, device=gpu_device(), max_num_seqs=2, block_size=4, **options)
    for _ in range(2):
        for index, prompt in enumerate(PROMPTS):
            engine.add(str(index), prompt, greedy(3))
            engine.step()
        engine.run()
        assert [engine.results[str(index)].tokens for index in range(len(PROMPTS))] == expected
