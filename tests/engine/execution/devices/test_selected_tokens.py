"""Tokens that attend within chunks or to selected ones on GPUs, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.triton_device import gpu_device

PROMPTS = [random_prompt(1, 15), random_prompt(2, 3)]  # of which 6 tokens are selected, or chunks have 8
SHAPES: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {
        "index_topk": 6,
        "num_hidden_layers": 2,
        "indexer_types": ["full", "shared"],
        "mlp_layer_types": ["dense", "dense"],
    },
    "llama4": {
        "attention_chunk_size": 8,
        "num_hidden_layers": 2,
        "layer_types": ["chunked_attention", "full_attention"],
        "moe_layers": [],
        "no_rope_layers": [1, 0],
    },
}
GRAPHS: dict[str, Any] = {"max_num_batched_tokens": 9, "cudagraph_capture_sizes": (2,)}
EAGER: dict[str, Any] = {"max_num_batched_tokens": 9, "enforce_eager": True}


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param("glm_moe_dsa", GRAPHS, marks=pytest.mark.slow),
        pytest.param("llama4", GRAPHS, marks=pytest.mark.slow),
        ("glm_moe_dsa", EAGER),
        ("llama4", EAGER),
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
