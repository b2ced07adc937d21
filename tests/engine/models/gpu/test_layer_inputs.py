"""Gemma 3n and 4, and linear recurrences on GPUs: tokens as those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model

CASES = ["gemma4", "gemma4-moe", "gemma3n", "recurrent_gemma", "minimax", "zamba2-plain"]
TOKENS = 3


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    """In the same batch as other requests, and behind prompts of several chunks."""
    model = make_model(case)
    engine = Engine(save_model(model, tmp_path), max_num_batched_tokens=8, max_num_seqs=4)
    prompts = [random_prompt(seed, length) for seed, length in ((1, 3), (2, 11))]
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, greedy(TOKENS))
    engine.run()
    for index, prompt in enumerate(prompts):
        tokens = engine.results[str(index)].tokens
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()
