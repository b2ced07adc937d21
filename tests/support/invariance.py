"""Requests with different parameters, and schedules that must not change their tokens."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from quire.config.options import ModelOptions
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.token_mask import TokenMask, token_mask
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.tokenizer import VOCAB_SIZE


def mask(*tokens: int) -> TokenMask:
    return token_mask(np.array(tokens, np.int32), VOCAB_SIZE)


def workload(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests with different parameters; about half of them share a prefix."""
    rng = random.Random(seed)
    shared = random_prompt(seed, 40)
    out = []
    for index in range(10):
        tail = random_prompt(seed * 100 + index, rng.randint(1, 30))
        prompt = shared[: rng.choice([8, 24, 40])] + tail if rng.random() < 0.5 else tail
        length = rng.randint(1, 24)
        if rng.random() < 0.4:
            params = greedy(length)
        else:
            params = SamplingParams(
                max_tokens=length,
                temperature=rng.choice([0.7, 1.0, 1.5]),
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 20]),
                min_p=rng.choice([0.0, 0.05]),
                repetition_penalty=rng.choice([1.0, 1.3]),
                presence_penalty=rng.choice([0.0, 0.5]),
                seed=rng.randint(0, 1 << 40),
            )
        out.append((prompt, params))
    return out


@cache
def alone(folder: Path, seed: int) -> list[list[int]]:
    """The tokens of each request of a workload alone in the engine, without chunking or prefix caching."""
    engine = Engine(folder, enable_prefix_caching=False)
    return [engine.generate(prompt, params).tokens for prompt, params in workload(seed)]


def together(engine: Engine, requests: list[tuple[list[int], SamplingParams]], seed: int) -> list[list[int]]:
    """Run all requests, which arrive at random steps among others that are aborted."""
    rng = random.Random(seed)
    pending = [(rng.randint(0, 12), index) for index in range(len(requests))]
    aborted: dict[str, int] = {}
    step = 0
    while pending or engine.busy:
        for when, index in [item for item in pending if item[0] <= step]:
            pending.remove((when, index))
            engine.add(f"r{index}", *requests[index])
        if rng.random() < 0.2:
            aborted[f"aborted-{step}"] = step + rng.randint(0, 4)
            engine.add(f"aborted-{step}", random_prompt(step, rng.randint(1, 40)), greedy(30))
        for name in [name for name, when in aborted.items() if when <= step]:
            del aborted[name]
            engine.abort(name)
        if engine.busy:
            engine.step()
        step += 1
    assert engine.blocks_used == 0
    return [engine.results[f"r{index}"].tokens for index in range(len(requests))]


SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "one at a time": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "small blocks": {"block_size": 3},
    "without prefix caching": {"enable_prefix_caching": False},
    "speculation": {"speculative_method": "ngram", "num_speculative_tokens": 5, "block_size": 4},
    "further steps": {"num_scheduler_steps": 8, "block_size": 4},
    "xxhash": {"prefix_caching_hash_algo": "xxhash", "block_size": 4},
}
# Other devices and executors; one workload each.
VARIANTS: dict[str, dict[str, Any]] = {
    "reference device": {"model": ModelOptions(device="reference")},
    "reference device, small chunks": {
        "model": ModelOptions(device="reference"),
        "max_num_batched_tokens": 7,
        "max_num_seqs": 4,
    },
    "reference device, speculation": {
        "model": ModelOptions(device="reference"),
        "speculative_method": "ngram",
        "block_size": 4,
    },
    "two steps in flight": {"in_flight": 2, "block_size": 4},
    "two steps in flight, small chunks": {"in_flight": 2, "max_num_batched_tokens": 7, "max_num_seqs": 4},
    "three steps in flight, speculation": {"in_flight": 3, "speculative_method": "ngram", "block_size": 4},
}
