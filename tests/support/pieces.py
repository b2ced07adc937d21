"""Prompts that arrive in pieces."""

from __future__ import annotations

import random

from quire.engine.client.sampling_params import SamplingParams
from tests.support.engine import Engine


def task(seed: int) -> SamplingParams:
    """Sampling whose result depends on which tokens are the prompt's."""
    return SamplingParams(
        max_tokens=8, temperature=1.0, seed=seed, repetition_penalty=1.3, presence_penalty=0.4, min_tokens=2
    )


def run_in_pieces(engine: Engine, prompts: dict[str, list[int]], seed: int) -> None:
    """Send all prompts in random pieces, in between steps, the last one sometimes empty."""
    rng = random.Random(seed)
    left = {}
    for name, prompt in prompts.items():
        cut = rng.randint(1, len(prompt))
        engine.add(name, prompt[:cut], task(len(prompt)), open=True)
        left[name] = prompt[cut:]
    while left or engine.busy:
        if left and rng.random() < 0.7:
            name = rng.choice(sorted(left))
            cut = rng.randint(0, len(left[name]))
            piece, left[name] = left[name][:cut], left[name][cut:]
            is_last = not left[name] and rng.random() < 0.5
            engine.extend(name, piece, last=is_last)
            if is_last:
                del left[name]
        if engine.busy:
            engine.step()
