"""Models that compute NaN for one token, and requests with and without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.config.options import ModelOptions
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.token_mask import token_mask
from tests.support.engine import Engine, random_prompt
from tests.support.tokenizer import VOCAB_SIZE

POISON = 200  # the token whose embedding is NaN
MESSAGE = "not a finite number"
GOOD = [token % POISON for token in random_prompt(1, 21)]
BAD = [*GOOD[:16], POISON, *GOOD[:4]]  # begins like the good prompt
OTHER = [token % POISON for token in random_prompt(2, 5)]


class poisoned:  # noqa: N801
    """The embedding of one token of a model is NaN within the block."""

    def __init__(self, engine: Engine) -> None:
        module = getattr(engine.model, "_module", engine.model)  # transformers' own
        embedding = module.get_input_embeddings() if module is not engine.model else engine.model.embed
        self._weight = embedding.weight.data

    def __enter__(self) -> None:
        self._row = self._weight[POISON].clone()
        self._weight[POISON] = torch.nan

    def __exit__(self, *_: object) -> None:
        self._weight[POISON] = self._row


def start(folder: Path, **options: Any) -> Engine:
    return Engine(folder, **{"block_size": 8, "max_num_batched_tokens": 48, **options})


def alone(folder: Path, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    engine = start(folder, enable_prefix_caching=False, model=ModelOptions(device="reference"))
    return [engine.generate(prompt, params).tokens for prompt in prompts]


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0, "seed": 1},
    "top_p": {"temperature": 1.0, "seed": 1, "top_p": 0.9},
    "top_k": {"temperature": 1.0, "seed": 1, "top_k": 5},
    "min_p": {"temperature": 1.0, "seed": 1, "min_p": 0.1},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    "allowed": {"allowed_tokens": token_mask(np.arange(40, 90, dtype=np.int32), VOCAB_SIZE)},
    "bias": {"logit_bias": {5: 50.0}, "min_tokens": 2},
}


def sampling(max_tokens: int, kind: str) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **SAMPLING[kind]})


def check_one_fails(engine: Engine, params: SamplingParams, good: list[int]) -> None:
    with poisoned(engine):
        engine.add("bad", BAD, params)
        engine.add("good", GOOD, params)
        engine.run()
    assert MESSAGE in (engine.results["bad"].error or "")
    assert engine.results["good"].tokens == good
    assert (engine.blocks_used, engine.corrupted) == (0, 1)
