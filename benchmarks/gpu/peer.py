"""transformers on a GPU: generate with a static cache and compiled decode steps, and its continuous batching."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.gpu.models import SHAPES

_TOKENS = 64


def measure_transformers(shape: str, batches: Sequence[int], context: int) -> dict[str, Any]:
    """Decode and prefill of a shape with random weights, by both ways to generate."""
    config = {name: value for name, value in SHAPES[shape].items() if name not in ("model_type", "architectures")}
    parsed = AutoConfig.for_model(SHAPES[shape]["model_type"], **config)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(parsed, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    rows = []
    for batch in batches:
        prompts = torch.randint(10, 1000, (batch, context), device="cuda")
        row = {"batch": batch, "context": context, **_static(model, prompts), **_continuous(model, prompts)}
        print(row, flush=True)
        rows.append(row)
    return {"rows": rows}


def _static(model: Any, prompts: torch.Tensor) -> dict[str, float]:
    """generate() with a static cache, whose decode steps transformers compiles."""

    def generate(tokens: int) -> None:
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
        )

    times = {}
    for tokens in (1, _TOKENS):
        generate(tokens)  # compiles
        times[tokens] = min(_timed(partial(generate, tokens)) for _ in range(2))
    step = (times[_TOKENS] - times[1]) / (_TOKENS - 1)
    return {
        "static_step_ms": round(step * 1e3, 3),
        "static_tokens_per_s": round(len(prompts) / step, 1),
        "static_prefill_tokens_per_s": round(prompts.numel() / times[1], 1),
    }


def _continuous(model: Any, prompts: torch.Tensor) -> dict[str, float]:
    """generate_batch(), prompts included."""
    inputs = prompts.tolist()
    settings = GenerationConfig(max_new_tokens=_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)

    def generate() -> None:
        model.generate_batch(inputs=inputs, generation_config=settings)

    generate()
    taken = _timed(generate)
    return {"continuous_tokens_per_s_with_prefill": round(len(prompts) * _TOKENS / taken, 1)}


def _timed(call: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started
