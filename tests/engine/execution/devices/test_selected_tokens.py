"""Tokens that attend to selected ones on GPUs, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.triton_device import gpu_device

PROMPTS = [random_prompt(1, 26), random_prompt(2, 3), random_prompt(3, 11)]  # of which 8 tokens are selected


@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 16, "cudagraph_capture_sizes": (3,)}, {"enforce_eager": True}]
)
def test_tokens_equal_those_of_the_reference_device(options: dict[str, Any], tmp_path: Path) -> None:
    """In chunks of prompts beside sequences that decode, padded to one size, with prefix hits; layers share selections."""
    model = make_model("glm_moe_dsa", index_topk=8)
    folder = save_model(model, tmp_path)
    reference = Engine(folder, model=ModelOptions(device="reference"), enable_prefix_caching=False)
    expected = [reference.generate(prompt, greedy(4)).tokens for prompt in PROMPTS]
    engine = Engine(folder, device=gpu_device(), max_num_seqs=3, block_size=4, **options)
    for _ in range(2):
        for index, prompt in enumerate(PROMPTS):
            engine.add(str(index), prompt, greedy(4))
            engine.step()
        engine.run()
        assert [engine.results[str(index)].tokens for index in range(len(PROMPTS))] == expected
