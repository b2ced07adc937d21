"""Decode steps of the engine core, without server and tokenizer, against batch and context, beside the floor of memory.

python -m benchmarks.cpu.steps MODEL --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.cpu.limits import Limits
from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build import CoreConfig, build_core
from quire.engine.core import EngineCore
from quire.engine.models.model_config import read_model_config
from quire.engine.wire.protocol import Abort, AddRequest, ModelInfo, SamplingParams, StepOutput
from quire.kernels import native

STEPS = 24
_UNTIMED = 2
_ROOM = 256  # tokens that a sequence may generate while others are still prefilled, and after


class Outbox:
    """Stands in for the transport: knows which sequences have begun."""

    def __init__(self) -> None:
        self.begun: set[str] = set()

    def send(self, message: Any) -> None:
        """Take a message of the core."""
        if isinstance(message, StepOutput):
            self.begun.update(output.request_id for output in message.outputs)

    def receive(self, _: float | None) -> None:
        """Nothing comes."""


class Steps:
    """A core over a model, stepped by hand."""

    def __init__(self, folder: Path, quantization: str, sequences: int, context: int, pages: str = "auto") -> None:
        self.outbox = Outbox()
        options: dict[str, Any] = {"kv_cache_memory": 6 << 30, "kv_cache_dtype": pages}
        engine = EngineOptions(max_num_seqs=sequences, prefix_caching=False, **options)
        model = ModelOptions(quantization=quantization, max_model_len=context + _ROOM)
        config = CoreConfig(folder=folder, model_config=read_model_config(folder), model=model, engine=engine)
        self.core: EngineCore
        self.info: ModelInfo
        self.core, self.info = build_core(config, self.outbox)  # type: ignore[arg-type]

    def measure(self, batch: int, context: int) -> dict[str, float]:
        """Seconds of prefilling all prompts, and of decode steps of the whole batch: median and fastest."""
        names = [f"{batch}-{context}-{number}" for number in range(batch)]
        rng = np.random.default_rng(context)
        for name in names:
            prompt = rng.integers(10, 1000, context).astype(np.int32)
            self.core._handle(AddRequest(name, prompt, SamplingParams(max_tokens=_ROOM, temperature=0.0)))
        started = time.perf_counter()
        while not self.outbox.begun.issuperset(names):
            self.core.step()
        prefill = time.perf_counter() - started
        times = []
        for _ in range(STEPS + _UNTIMED):
            started = time.perf_counter()
            self.core.step()
            times.append(time.perf_counter() - started)
        self.core._handle(Abort(names))
        self.core.step()
        return {"prefill": prefill, "median": median(times[_UNTIMED:]), "best": min(times[_UNTIMED:])}


def floor(folder: Path, info: ModelInfo, limits: Limits, quantization: str, batch: int, context: int) -> float:
    """Seconds in which the cache and all weights but the embedding, whose rows are looked up, can be read once."""
    config = json.loads((folder / "config.json").read_text())
    embedding = info.vocab_size * config["hidden_size"] * getattr(torch, info.dtype).itemsize
    if config.get("tie_word_embeddings") and quantization == "none":
        embedding = 0  # the head reads it
    cache = batch * context * info.cache_bytes / (info.num_blocks * info.block_size)
    return float(info.weight_bytes - embedding + cache) / limits.bandwidth


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8"))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 1024])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    limits = Limits.measured()
    sequences, context = max(options.batches), max(options.contexts)
    steps = Steps(options.model, options.quantization, sequences, context, options.kv_cache_dtype)
    rows = []
    for context in options.contexts:
        for batch in options.batches:
            if batch * (context + _ROOM) > steps.info.num_blocks * steps.info.block_size:
                continue  # they would not be in the cache together
            row = steps.measure(batch, context)
            share = floor(options.model, steps.info, limits, options.quantization, batch, context) / row["best"]
            rows.append(
                {
                    "batch": batch,
                    "context": context,
                    "prefill_tokens_per_s": round(batch * context / row["prefill"], 1),
                    "step_ms": {"median": round(row["median"] * 1e3, 2), "best": round(row["best"] * 1e3, 2)},
                    "tokens_per_s": round(batch / row["median"], 1),
                    "floor_share": round(share, 2),
                }
            )
            print(rows[-1], flush=True)
    report = {
        "date": date.today().isoformat(),
        "model": options.model.name,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "threads": torch.get_num_threads(),
        "instructions": native.instructions(),
        "read_gb_per_s": round(limits.bandwidth / 1e9, 1),
        "weight_bytes": steps.info.weight_bytes,
        "steps": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
