"""What tests of families of models check of each: transformers' tokens, in any schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.models.errors import UnsupportedModel
from tests.support.engine import Engine, greedy, load, random_prompt
from tests.support.invariance import SCHEDULES, alone, together, workload
from tests.support.oracle import TOLERANCE

SEED = 1  # of the workload
SCHEDULED: list[dict[str, Any]] = [
    SCHEDULES["small chunks"],
    SCHEDULES["speculation"],
    {"in_flight": 2, "block_size": 4},
]


def check_log_probabilities(
    model: Any, folder: Path, device: Any, *, prompts: Sequence[int] = (5, 140), tokens: int = 16
) -> None:
    """Check greedy tokens and their log-probabilities, of prompts that take one step and several.

    Args:
        model: transformers' model.
        folder: where it is.
        device: the engine's.
        prompts: their lengths.
        tokens: number of tokens.
    """
    engine = Engine(folder, model=ModelOptions(device=device), block_size=8, max_num_batched_tokens=48)
    assert engine.info.implementation == "quire"
    for seed, length in enumerate(prompts, 1):
        prompt = random_prompt(seed, length)
        result = engine.generate(prompt, greedy(tokens, logprobs=20))
        sequence = torch.tensor([[*prompt, *result.tokens[:-1]]])
        with torch.inference_mode():
            logits = model(sequence, use_cache=False).logits[0, length - 1 :]
        assert result.tokens == logits.argmax(-1).tolist()
        scale, expected = logits.abs().amax(-1), logits.log_softmax(-1)
        for step, output in enumerate(result.outputs):
            assert output.logprobs is not None
            ids, values = output.logprobs[0].token_ids, torch.tensor(output.logprobs[0].logprobs)
            assert (values - expected[step][ids]).abs().max() / scale[step] < TOLERANCE


def check_schedule(folder: Path, engine: Engine, seed: int = SEED) -> None:
    """Check that an engine gives each request of a workload the tokens that it gets alone."""
    assert together(engine, workload(seed), seed) == alone(folder, seed)


def check_ranks(folder: Path, parallel: Mapping[str, int], seed: int = SEED) -> None:
    """Check that ranks give the tokens of one. `seed`: of the workload."""
    engine = Engine(folder, parallel=ParallelOptions(**parallel))
    try:
        check_schedule(folder, engine, seed)
    finally:
        engine.core.close()


def check_bits(folder: Path, quantization: Any, *, requests: int = 4, tokens: int = 12) -> None:
    """Check that log-probabilities in bfloat16 have the same bits in a batch as alone, and tokens in further steps."""
    make = partial(Engine, folder, model=ModelOptions(dtype="bfloat16", quantization=quantization))
    prompts = [random_prompt(seed, 5 + 17 * seed) for seed in range(requests)]
    params = greedy(tokens, logprobs=3)
    batch, single = make(max_num_batched_tokens=16), make()
    for index, prompt in enumerate(prompts):
        batch.add(f"r{index}", prompt, params)
    batch.run()
    for index, prompt in enumerate(prompts):
        outputs = list(zip(batch.results[f"r{index}"].outputs, single.generate(prompt, params).outputs, strict=True))
        assert len(outputs) == tokens
        assert all(beside_others.logprobs == by_itself.logprobs for beside_others, by_itself in outputs)
    ahead = make(num_scheduler_steps=8)
    for index, prompt in enumerate(prompts):
        ahead.add(f"r{index}", prompt, greedy(tokens))
    ahead.run()
    for request_id, result in ahead.results.items():
        assert result.tokens == batch.results[request_id].tokens


def check_refused(model: Any, folder: Path, changes: Mapping[str, Any], message: str, changed: Path) -> None:
    """Check that a config with changes, which is written to `changed`, is refused with a message."""
    config = type(model.config).from_pretrained(folder)
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    config.save_pretrained(changed)
    with pytest.raises(UnsupportedModel, match=message):
        load(changed, model_impl="quire")
