"""Decode steps of the engine core by batch size and context length, relative to the memory bandwidth bound.

The core runs without server and tokenizer. With --eager each size is also measured without replays of step graphs; with
--load-format dummy the folder has nothing but a config.

python -m benchmarks.cpu.steps MODEL --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.cpu.limits import Limits
from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.engine import build_core
from quire.engine.client.model_info import ModelInfo
from quire.engine.client.protocol import Abort, AddRequest, StepOutput, TokensOutput
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.core.loop import EngineCore
from quire.engine.execution.step_graphs import EagerSteps
from quire.engine.models.layers.embedding import Embedding
from quire.engine.models.model_config import read_model_config
from quire.kernels import native

STEPS = 24
_WARMUP_STEPS = 2
_MAX_TOKENS = 256  # maximum tokens per sequence: during the prefill of the others, and afterwards


def count_steps(message: StepOutput) -> int:
    """Return how many steps an output is of: decode steps may follow each other before the scheduler learns of them."""
    return max((len(output.token_ids) for output in message.outputs if isinstance(output, TokensOutput)), default=1)


class RecordingChannel:
    """A stub transport that records which sequences have started to generate, and counts steps."""

    inbox = None  # no messages arrive

    def __init__(self) -> None:
        self.started_requests: set[str] = set()
        self.steps = 0

    def send(self, message: Any) -> None:
        """Record the requests of a step output."""
        if isinstance(message, StepOutput):
            self.started_requests.update(output.request_id for output in message.outputs)
            self.steps += count_steps(message)

    def receive(self, _: float | None) -> None:
        """Return None: there are no messages."""

    def receive_arrived(self, *_: type) -> None:
        """Return None: there are no messages."""


def decode_seconds(core: EngineCore, channel: RecordingChannel, steps: int) -> list[float]:
    """Return seconds of decode steps, at least so many: means of those that the core runs before it schedules again."""
    times, end = [], channel.steps + steps
    while channel.steps < end:
        before, started = channel.steps, time.perf_counter()
        core.step()
        times.append((time.perf_counter() - started) / (channel.steps - before))
    return times


class SteppedCore:
    """An engine core with a model, whose steps are called directly."""

    def __init__(
        self,
        folder: Path,
        quantization: str,
        sequences: int,
        context: int,
        pages: str = "auto",
        load_format: Literal["auto", "dummy"] = "auto",
        model_impl: Literal["auto", "quire", "transformers"] = "auto",
    ) -> None:
        self.channel = RecordingChannel()
        options: dict[str, Any] = {"kv_cache_memory_bytes": 6 << 30, "kv_cache_dtype": pages}
        engine = EngineOptions(max_num_seqs=sequences, enable_prefix_caching=False, **options)
        model = ModelOptions(
            quantization=quantization,
            max_model_len=context + _MAX_TOKENS,
            load_format=load_format,
            model_impl=model_impl,
        )
        model_config = read_model_config(folder, model_impl)
        config = CoreConfig(folder=folder, model_config=model_config, model=model, engine=engine)
        self.core: EngineCore
        self.info: ModelInfo
        self.core, self.info = build_core(config, self.channel)  # type: ignore[arg-type]

    @property
    def model(self) -> Any:
        """The model that the core runs."""
        executor: Any = self.core.executor
        return executor._runner.model

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run steps without replays within."""
        runner: Any = self.core.executor
        runner = runner._runner
        replays, runner.steps = runner.steps, EagerSteps(runner.model)
        try:
            yield
        finally:
            runner.steps = replays

    def measure(self, batch: int, context: int) -> dict[str, float]:
        """Return seconds of the prefill of all prompts, and of decode steps of the whole batch: median and fastest."""
        names = [f"{batch}-{context}-{number}" for number in range(batch)]
        self.channel.started_requests.clear()
        rng = np.random.default_rng(context)
        for name in names:
            prompt = rng.integers(10, 1000, context).astype(np.int32)
            self.core._handle(AddRequest(name, prompt, SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0)))
        started = time.perf_counter()
        while not self.channel.started_requests.issuperset(names):
            self.core.step()
        prefill = time.perf_counter() - started
        decode_seconds(self.core, self.channel, _WARMUP_STEPS)
        times = decode_seconds(self.core, self.channel, STEPS)
        self.core._handle(Abort(names))
        while self.core.has_work:
            self.core.step()
        return {"prefill": prefill, "median": median(times), "best": min(times)}


def unread_table_bytes(model: Any) -> int:
    """Return bytes of tables of embeddings, of which steps read a few rows; 0 of one that the head multiplies with."""
    tables = [module for module in model.modules() if isinstance(module, Embedding)]
    plain = [table.weight for table in tables if table.weight is not None and table.weight is not model.head.weight]
    return sum(weight.nbytes for weight in plain) + sum(table.packed_bytes for table in tables)


def bandwidth_bound(steps: SteppedCore, limits: Limits, batch: int, context: int) -> float:
    """Return seconds for reading the KV cache and the weights once, those of all experts included.

    States of a fixed size are read and written.
    """
    info, cache = steps.info, steps.core.executor.cache
    slots = None if cache is None else cache.states
    states = 0 if slots is None else slots.memory.numel()
    embedding = unread_table_bytes(steps.model)
    read = batch * context * (info.cache_bytes - states) / (info.num_blocks * info.block_size)
    changed = 0 if slots is None else 2 * batch * slots.memory.shape[1]
    return float(info.weight_bytes - embedding + read + changed) / limits.bandwidth


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8"))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 1024])
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--eager", action="store_true", help="also measure steps without replays, in alternation")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    limits = Limits.measured()
    sequences, context = max(options.batches), max(options.contexts)
    pages, load_format = options.kv_cache_dtype, options.load_format
    steps = SteppedCore(options.model, options.quantization, sequences, context, pages, load_format)
    rows = []
    for context in options.contexts:
        for batch in options.batches:
            if batch * (context + _MAX_TOKENS) > steps.info.num_blocks * steps.info.block_size:
                continue  # they do not fit in the KV cache together
            row = steps.measure(batch, context)
            share = bandwidth_bound(steps, limits, batch, context) / row["best"]
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
            if options.eager:
                with steps.eager():
                    eager = steps.measure(batch, context)
                rows[-1]["eager_step_ms"] = {name: round(eager[name] * 1e3, 2) for name in ("median", "best")}
                rows[-1]["eager_ratio"] = round(eager["median"] / row["median"], 2)
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
