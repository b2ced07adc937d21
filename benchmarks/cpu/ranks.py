"""One model by one process, and divided between two ranks by tensor and by pipeline parallelism, on one core each.

The ranks are those of one machine, or of two nodes that have an address of this machine each. Every rank is a process
with one thread. The engines are alive at once and measured in turn, in short intervals, so that all of them have the
same disturbances. Reported are the median and the best interval, and the CPU time of each rank for a step. From these
times follows what a pipeline can reach where each rank has a core of its own: a step takes the sum of all ranks without
overlap, and with it the CPU time of the slowest rank.

OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE THP_MEM_ALLOC_ENABLE=1 python -m benchmarks.cpu.ranks MODEL --out FILE.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from benchmarks.cpu.steps import count_steps
from quire.config.options import EngineOptions, ModelOptions, ParallelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.engine import build_core
from quire.engine.build.nodes import run_node
from quire.engine.client.protocol import Abort, AddRequest, StepOutput
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.core.loop import EngineCore
from quire.engine.models.model_config import read_model_config
from quire.kernels import native

MODES: dict[str, tuple[int, dict[str, int]]] = {  # threads of each rank, and options
    "one process": (1, {}),
    "one process, two threads": (2, {}),
    "tensor parallel": (1, {"tensor_parallel_size": 2}),
    "pipeline parallel": (1, {"pipeline_parallel_size": 2}),
    "tensor parallel on two nodes": (1, {"tensor_parallel_size": 2, "nnodes": 2, "master_port": 29511}),
    "pipeline parallel on two nodes": (1, {"pipeline_parallel_size": 2, "nnodes": 2, "master_port": 29512}),
}
_CONTEXT = 64  # tokens of the prompts of sequences that generate
_PROMPTS, _PROMPT = 4, 1024  # prompts that are computed alone, and their tokens
_WARM_UP = 8  # steps


class Interval(NamedTuple):
    """What was measured in an interval. `cpu_ms`: CPU time of each rank for a step."""

    steps_per_s: float
    tokens_per_s: float
    cpu_ms: list[float]


class CountingChannel:
    """A stub transport that counts steps and tokens."""

    inbox = None  # no messages arrive

    def __init__(self) -> None:
        self.steps = self.tokens = 0

    def send(self, message: Any) -> None:
        """Count the tokens of a step, of prompts and generated ones."""
        if isinstance(message, StepOutput) and message.stats.step_tokens:
            self.steps += count_steps(message)
            self.tokens += message.stats.step_tokens

    def receive(self, _: float | None) -> None:
        """Return None: there are no messages."""

    def receive_arrived(self, *_: type) -> None:
        """Return None: there are no messages."""


def _run_node(config: CoreConfig) -> None:
    """Run the second node, whose address is another one of this machine."""
    parallel = config.parallel.model_copy(update={"node_rank": 1, "headless": True, "node_addr": "127.0.0.2"})
    run_node(replace(config, parallel=parallel), lambda: False, lambda: None)


def _rank_processes() -> list[psutil.Process]:
    """The ranks below this process, without those that have started them."""
    started = [
        child for child in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(child.cmdline())
    ]
    parents = {child.ppid() for child in started}
    return [child for child in started if child.pid not in parents]


class MeasuredCore:
    """An engine core whose steps are called directly."""

    def __init__(self, folder: Path, dtype: str, mode: str) -> None:
        self._threads, parallel = MODES[mode]
        self.channel = CountingChannel()
        engine = EngineOptions(
            max_num_seqs=64, kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False, num_threads=self._threads
        )
        config = CoreConfig(
            folder=folder,
            model_config=read_model_config(folder),
            model=ModelOptions(dtype=dtype, max_model_len=2048),
            engine=engine,
            parallel=ParallelOptions(**parallel),
        )
        before = _rank_processes()
        if config.parallel.nnodes > 1:
            multiprocessing.get_context("spawn").Process(target=_run_node, args=(config,)).start()
        self.core: EngineCore
        self.core, _ = build_core(config, self.channel)  # type: ignore[arg-type]
        self._ranks = [psutil.Process(), *(rank for rank in _rank_processes() if rank not in before)]
        self._names = 0

    def decode(self, batch: int, seconds: float) -> Interval:
        """Let `batch` sequences generate."""
        names = self._add(batch, _CONTEXT, 1900)
        while self.core.scheduler.stats().waiting:
            self.core.step()
        for _ in range(_WARM_UP):
            self.core.step()
        end = time.perf_counter() + seconds
        interval = self._measure(lambda: time.perf_counter() < end)
        self.core._handle(Abort(names))
        self._finish()
        return interval

    def prefill(self) -> Interval:
        """Compute prompts alone."""
        self._add(_PROMPTS, _PROMPT, 1)
        return self._measure(lambda: self.core.has_work)

    def _measure(self, goes_on: Callable[[], bool]) -> Interval:
        self.channel.steps = self.channel.tokens = 0
        cpu, started = self._cpu_times(), time.perf_counter()
        while goes_on():
            self.core.step()
        passed = time.perf_counter() - started
        used = [after - before for before, after in zip(cpu, self._cpu_times(), strict=True)]
        steps = self.channel.steps
        return Interval(steps / passed, self.channel.tokens / passed, [1e3 * seconds / steps for seconds in used])

    def _cpu_times(self) -> list[float]:
        times = [rank.cpu_times() for rank in self._ranks]
        return [float(time.user + time.system) for time in times]

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

    def _finish(self) -> None:
        while self.core.has_work:
            self.core.step()


def report(intervals: Sequence[Interval]) -> dict[str, Any]:
    """Medians of some intervals, and the best one."""
    return {
        "steps_per_s": round(median(interval.steps_per_s for interval in intervals), 1),
        "tokens_per_s": round(median(interval.tokens_per_s for interval in intervals), 1),
        "best_tokens_per_s": round(max(interval.tokens_per_s for interval in intervals), 1),
        "cpu_ms": [round(median(times), 2) for times in zip(*(interval.cpu_ms for interval in intervals), strict=True)],
    }


def measure(cores: dict[str, MeasuredCore], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all engines in turn; returns a row for each load."""
    intervals: dict[str, dict[str, list[Interval]]] = {}
    for _ in range(options.rounds):
        for batch in options.batches:
            row = intervals.setdefault(f"{batch} sequences generate", {})
            for mode, core in cores.items():
                row.setdefault(mode, []).append(core.decode(batch, options.seconds))
        row = intervals.setdefault(f"{_PROMPTS} prompts of {_PROMPT} tokens", {})
        for mode, core in cores.items():
            row.setdefault(mode, []).append(core.prefill())
    return [{"load": load, **{mode: report(each) for mode, each in row.items()}} for load, row in intervals.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--modes", nargs="*", default=[*MODES], choices=[*MODES])
    parser.add_argument("--batches", type=int, nargs="*", default=[2, 8, 32])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each interval in which sequences generate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    cores = {mode: MeasuredCore(options.model, options.dtype, mode) for mode in options.modes}
    try:
        rows = measure(cores, options)
    finally:
        for core in cores.values():
            core.core.close()
    for row in rows:
        print(json.dumps(row), flush=True)
    if options.out:
        facts = {
            "date": date.today().isoformat(),
            "model": options.model.name,
            "dtype": options.dtype,
            "torch": torch.__version__,
            "instructions": native.instructions(),
            "load_average": round(psutil.getloadavg()[0], 1),
        }
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
