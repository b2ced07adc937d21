"""transformers on a GPU: generate with a static cache and compiled decode steps, and its continuous batching."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.gpu.models import GENERATED, SHAPES

logger = logging.getLogger(__name__)
CONTINUOUS: dict[str, Any] = {"allow_block_sharing": False}  # no prefix hits; memory as it chooses


class Transformers:
    """A model of transformers with random weights."""

    def __init__(self, shape: str) -> None:
        config = {name: value for name, value in SHAPES[shape].items() if name not in ("model_type", "architectures")}
        parsed = AutoConfig.for_model(SHAPES[shape]["model_type"], **config)
        with torch.device("cuda"):
            self._model: Any = AutoModelForCausalLM.from_config(parsed, dtype=torch.bfloat16).eval()
        self._model.generation_config.eos_token_id = None
        self._attention = self._model.config._attn_implementation

    def measure(self, batch: int, context: int) -> dict[str, Any]:
        """Prefill and decode of one case, by both ways to generate; one that fails has its error."""
        prompts = torch.randint(10, 1000, (batch, context), device="cuda")
        results: dict[str, Any] = {}
        for name, run in (("static", self._static), ("continuous", self._continuous)):
            try:
                results |= run(prompts)
            except Exception as error:  # error boundary: the other way is worth measuring
                logger.exception("%s failed", name)
                results[f"{name}_error"] = f"{type(error).__name__}: {error}"
        return results

    def _static(self, prompts: torch.Tensor) -> dict[str, float]:
        """generate() with a static cache, whose decode steps transformers compiles."""
        torch.compiler.reset()  # sizes of an earlier case would make them dynamic, which is slower
        self._model.set_attn_implementation(self._attention)

        def generate(tokens: int) -> None:
            out = self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=tokens,
                do_sample=False,
                cache_implementation="static",
                pad_token_id=0,
            )
            _check(out.shape[1] == prompts.shape[1] + tokens)

        generate(GENERATED)  # compiles
        generate(GENERATED)  # records CUDA graphs
        times = {tokens: min(_timed(partial(generate, tokens)) for _ in range(2)) for tokens in (GENERATED, 1)}
        step = (times[GENERATED] - times[1]) / (GENERATED - 1)
        return {
            "static_step_ms": round(step * 1e3, 3),
            "static_tokens_per_s": round(len(prompts) / step, 1),
            "static_prefill_tokens_per_s": round(prompts.numel() / times[1], 1),
            "static_tokens_per_s_with_prefill": round(len(prompts) * GENERATED / times[GENERATED], 1),
        }

    def _continuous(self, prompts: torch.Tensor) -> dict[str, float]:
        """generate_batch(), prompts included, with a manager that exists."""
        _free_memory()
        inputs = prompts.tolist()
        options = {
            "generation_config": GenerationConfig(
                max_new_tokens=GENERATED, do_sample=False, eos_token_id=None, pad_token_id=0
            ),
            "continuous_batching_config": ContinuousBatchingConfig(**CONTINUOUS),
            "persistent_manager": True,
        }

        def generate() -> None:
            out = self._model.generate_batch(inputs=inputs, **options)
            _check(
                len(out) == len(inputs) and all(len(output.generated_tokens) == GENERATED for output in out.values())
            )

        try:
            generate()
            taken = min(_timed(generate) for _ in range(2))
        finally:
            self._model.destroy_cached_continuous_batching_manager()
            _free_memory()
        return {"continuous_tokens_per_s_with_prefill": round(len(prompts) * GENERATED / taken, 1)}


def _check(complete: bool) -> None:
    if not complete:  # generate_batch() logs errors and returns what there is
        raise RuntimeError("fewer tokens were generated than asked for; see the log")


def _free_memory() -> None:
    torch.compiler.reset()  # its CUDA graphs hold memory
    gc.collect()
    torch.cuda.empty_cache()


def _timed(call: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started
