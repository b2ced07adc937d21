"""One model by one process, and divided between two ranks by tensor and by pipeline parallelism, on one core each.

Every rank is a process with one thread. The engines are alive at once and measured in turn, several times. A pipeline
is compared with its floor, in which both stages compute all the time: `bound` is the speed of one process with one
thread and half of the batch, times two; it holds where the stages do not slow each other down.

OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE THP_MEM_ALLOC_ENABLE=1 python -m benchmarks.cpu.ranks MODEL --out FILE.json
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

from quire.config.options import EngineOptions, ModelOptions, ParallelOptions
from quire.engine.build import build_core
from quire.engine.core import EngineCore
from quire.engine.core_config import CoreConfig
from quire.engine.models.model_config import read_model_config
from quire.engine.wire.protocol import Abort, AddRequest, StepOutput
from quire.engine.wire.sampling_params import SamplingParams
from quire.kernels import native

MODES: dict[str, tuple[int, dict[str, int]]] = {  # threads of each rank, and options
    "one process": (1, {}),
    "one process, two threads": (2, {}),
    "tensor parallel": (1, {"tensor_parallel_size": 2}),
    "pipeline parallel": (1, {"pipeline_parallel_size": 2}),
}
_CONTEXT = 64  # tokens of the prompts of decoding sequences
_WARM_UP = 8  # steps


class CountingChannel:
    """A stub transport that counts steps and tokens."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0

    def send(self, message: Any) -> None:
        """Count the tokens of a step, of prompts and generated ones."""
        if isinstance(message, StepOutput) and message.stats.step_tokens:
            self.steps += 1
            self.tokens += message.stats.step_tokens

    def receive(self, _: float | None) -> None:
        """Return None: there are no messages."""


class MeasuredCore:
    """An engine core whose steps are called directly."""

    def __init__(self, folder: Path, dtype: str, mode: str) -> None:
        self._threads, parallel = MODES[mode]
        self.channel = CountingChannel()
        engine = EngineOptions(
            max_num_seqs=64,
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
            num_threads=self._threads,
        )
        model = ModelOptions(dtype=dtype, max_model_len=2048)
        config = CoreConfig(
            folder=folder,
            model_config=read_model_config(folder),
            model=model,
            engine=engine,
            parallel=ParallelOptions(**parallel),
        )
        self.core: EngineCore
        self.core, _ = build_core(config, self.channel)  # type: ignore[arg-type]
        self._names = 0

    def decode(self, batch: int, seconds: float) -> tuple[float, float]:
        """Steps and tokens per second of `batch` sequences that generate."""
        names = self._add(batch, _CONTEXT, 1900)
        while self.core.scheduler.stats().waiting:
            self.core.step()
        for _ in range(_WARM_UP):
            self.core.step()
        measured = self._run_for(seconds)
        self._end(names)
        return measured

    def prefill(self, prompts: int, length: int) -> float:
        """Tokens per second of prompts that are computed alone."""
        self._add(prompts, length, 1)
        self.channel.tokens, started = 0, time.perf_counter()
        while self.core.has_work:
            self.core.step()
        return prompts * length / (time.perf_counter() - started)

    def _run_for(self, seconds: float) -> tuple[float, float]:
        self.channel.steps = self.channel.tokens = 0
        started = time.perf_counter()
        while (passed := time.perf_counter() - started) < seconds:
            self.core.step()
        return self.channel.steps / passed, self.channel.tokens / passed

    def _add(self, count: int, length: int, max_tokens: int) -> list[str]:
        native.set_threads(self._threads)
        rng = np.random.default_rng(length)
        names = [f"{self._names + number}" for number in range(count)]
        self._names += count
        for name in names:
            prompt = rng.integers(10, 1000, length).astype(np.int32)
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            self.core._handle(AddRequest(name, prompt, params))
        return names

    def _end(self, names: list[str]) -> None:
        self.core._handle(Abort(names))
        while self.core.has_work:
            self.core.step()


def measure(cores: dict[str, MeasuredCore], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all engines in turn; returns a row for each load."""
    decode: dict[tuple[int, str], list[tuple[float, float]]] = {}
    prefill: dict[str, list[float]] = {}
    batches = sorted({*options.batches, *(-(-batch // 2) for batch in options.batches)})  # halves for the floor
    for _ in range(options.rounds):
        for mode, core in cores.items():
            for batch in batches:
                decode.setdefault((batch, mode), []).append(core.decode(batch, options.seconds))
            prefill.setdefault(mode, []).append(core.prefill(4, 1024))
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        row: dict[str, Any] = {"load": f"decode, {batch} sequences"}
        for mode in cores:
            steps, tokens = (median(values) for values in zip(*decode[batch, mode], strict=True))
            row[mode] = {"steps_per_s": round(steps, 1), "tokens_per_s": round(tokens, 1)}
        alone = median(tokens for _, tokens in decode[-(-batch // 2), "one process"])
        row["bound"] = round(2 * alone, 1)
        rows.append(row)
    row = {"load": "prompts of 1,024 tokens"}
    row |= {mode: {"tokens_per_s": round(median(values), 1)} for mode, values in prefill.items()}
    row["bound"] = round(2 * median(prefill["one process"]), 1)
    return [*rows, row]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", type=int, nargs="*", default=[2, 8, 32])
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement of decode steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    cores = {mode: MeasuredCore(options.model, options.dtype, mode) for mode in MODES}
    try:
        rows = measure(cores, options)
    finally:
        for core in cores.values():
            core.core.close()
    for row in rows:
        print(json.dumps(row), flush=True)
    report = {
        "date": date.today().isoformat(),
        "model": options.model.name,
        "dtype": options.dtype,
        "torch": torch.__version__,
        "instructions": native.instructions(),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
