"""A decode step of one sequence by its parts, beside a plain read of the bytes that its products read.

The core runs without server and tokenizer. All are measured in turns, in one process and with the same threads:

- read: as many bytes as all packed weights have, in order,
- products: those of one row with each weight, in the order of loading, as in a step but without what lies between,
- kernels: all kernels of a step,
- step: a whole step, the mean of those that the core runs before it schedules again.

OMP_WAIT_POLICY=PASSIVE THP_MEM_ALLOC_ENABLE=1 python -m benchmarks.cpu.decode MODEL --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import quantiles
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.cpu.limits import MemoryRead
from benchmarks.cpu.steps import RecordingChannel, decode_seconds
from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.engine import build_core
from quire.engine.client.protocol import AddRequest
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.core.loop import EngineCore
from quire.engine.models.model_config import read_model_config
from quire.kernels import native
from quire.kernels.capture import CapturedCalls, RowKind, Workspace
from quire.kernels.packed_groups import PackedGroups

ROUNDS, PROMPT, CONTEXT = 60, 32, 1024


def loaded_core(folder: Path, channel: RecordingChannel) -> EngineCore:
    """Return the core of a model that has one sequence, which decodes."""
    engine = EngineOptions(max_num_seqs=16, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 30)
    model = ModelOptions(dtype="bfloat16", max_model_len=CONTEXT)
    config = CoreConfig(folder=folder, model_config=read_model_config(folder), model=model, engine=engine)
    core, _ = build_core(config, channel)  # type: ignore[arg-type]
    prompt = np.random.default_rng(0).integers(10, 1000, PROMPT).astype(np.int32)
    core._handle(AddRequest("decoded", prompt, SamplingParams(max_tokens=CONTEXT - PROMPT, temperature=0.0)))
    while "decoded" not in channel.started_requests:
        core.step()
    for _ in range(8):  # until steps are captured
        core.step()
    return core


def packed_weights() -> list[PackedGroups]:
    """Return all packed weights in memory, in the order in which they were made."""
    return [made for made in gc.get_objects() if type(made) is PackedGroups]


def captured_products(weights: Sequence[PackedGroups]) -> Callable[[], object]:
    """Return what multiplies a row with each weight."""
    rows = {weight.size_in: torch.randn(1, weight.size_in).bfloat16() for weight in weights}
    counts = [1] * len(RowKind)

    def multiply() -> None:
        for weight in weights:
            weight(rows[weight.size_in], None)

    calls = CapturedCalls(multiply, Workspace(), counts)
    assert calls.complete
    return lambda: calls.replay(counts)


class StepTimes:
    """Seconds of a core's steps, and those in which captured kernels of a step were replayed."""

    def __init__(self, core: EngineCore, channel: RecordingChannel) -> None:
        self._core = core
        self._channel = channel
        self.kernels: list[float] = []

    def take(self) -> float:
        """Return the seconds of a step."""
        replay = CapturedCalls.replay

        def timed_replay(calls: CapturedCalls, counts: Sequence[int]) -> None:
            started = time.perf_counter()
            replay(calls, counts)
            self.kernels.append(time.perf_counter() - started)

        with mock.patch.object(CapturedCalls, "replay", timed_replay):
            return decode_seconds(self._core, self._channel, 1)[0]


def seconds_of(part: Callable[[], object]) -> float:
    """Return the seconds that a part takes."""
    started = time.perf_counter()
    part()
    return time.perf_counter() - started


def measured(core: EngineCore, channel: RecordingChannel, rounds: int) -> dict[str, Any]:
    """Return the report: milliseconds of each part, the first quartile, and shares of the read."""
    weights = packed_weights()
    size = sum(weight.nbytes for weight in weights)
    memory, products, steps = (
        MemoryRead(size),
        captured_products(weights),
        StepTimes(core, channel),
    )
    seconds: dict[str, list[float]] = {"read": [], "products": [], "step": [], "kernels": steps.kernels}
    for _ in range(rounds):
        seconds["read"].append(seconds_of(memory))
        seconds["products"].append(seconds_of(products))
        seconds["step"].append(steps.take())
    quartiles = {name: quantiles(values, n=4)[0] for name, values in seconds.items()}
    return {
        "packed_mb": round(size / 1e6, 1),
        "read_gb_per_s": round(size / quartiles["read"] / 1e9, 1),
        "ms": {name: round(1e3 * value, 2) for name, value in quartiles.items()},
        "share_of_read": {name: round(quartiles["read"] / value, 2) for name, value in quartiles.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder, or that of a GGUF file in quire/gguf of the user's cache")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    channel = RecordingChannel()
    report = {
        "date": date.today().isoformat(),
        "model": options.model.name,
        "threads": torch.get_num_threads(),
        "instructions": native.instructions(),
        **measured(loaded_core(options.model, channel), channel, options.rounds),
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
