"""Time of an engine step outside the model: scheduling, tables, block hashes, sampling stages, messages.

The model answers at once, over a small vocabulary. Time is the thread's own CPU time.

python -m benchmarks.cpu.request_tracking --out benchmarks/results/FILE.json
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

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.engine.core import EngineCore
from quire.engine.execution.attention.paged import PagedAttention
from quire.engine.execution.cache import KVCache
from quire.engine.execution.runner import ModelRunner
from quire.engine.execution.sampling.sampler import Sampler
from quire.engine.execution.table import RequestTable
from quire.engine.models.decoder import CacheShape
from quire.engine.models.layers.step import Attend
from quire.engine.scheduling.blocks import BlockPool, hasher_named
from quire.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from quire.engine.wire.protocol import AddRequest, SamplingParams

STEPS = 300
PROMPT = 256
_UNTIMED = 20
_VOCAB, _BLOCK, _CONTEXT = 1024, 16, 1024


class Instant:
    """A model that says token 7 after no time at all."""

    caches: Sequence[CacheShape] = (CacheShape(1, 32, 32),)

    def __init__(self) -> None:
        self._logits = torch.zeros(PROMPT, _VOCAB)
        self._logits[:, 7] = 1.0

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor) -> Tensor:
        """Nothing to attend to."""
        return self._logits[: len(rows)]

    def logits(self, features: Tensor) -> Tensor:
        """They are there."""
        return features

    def decode(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The same."""
        return self._logits[: len(tokens if attend.ends is None else attend.ends)]

    def set_context(self, context_len: int) -> None:
        """It has no ropes."""


class Encoder:
    """Stands in for the transport: encodes what it would send."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: Any) -> None:
        """Encode and forget."""
        self._encode(message)

    def receive(self, _: float | None) -> None:
        """Nothing comes."""


def measure(batch: int, params: SamplingParams) -> dict[str, float]:
    """Microseconds of a decode step of so many sequences: median and fastest."""
    model = Instant()
    blocks = batch * _CONTEXT // _BLOCK
    table = RequestTable(batch, _CONTEXT, _BLOCK)
    attention = PagedAttention(KVCache(model.caches, blocks, _BLOCK, torch.bfloat16), table, torch.bfloat16)
    runner = ModelRunner(model, attention, table, Sampler(table, _VOCAB))
    limits = SchedulerLimits(max_seqs=batch, max_tokens=max(1024, batch), max_model_len=_CONTEXT)
    scheduler = Scheduler(limits, BlockPool(blocks, _BLOCK), hasher=hasher_named("sha256"))
    core = EngineCore(scheduler, runner.execute, Encoder(), vocab_size=_VOCAB)  # type: ignore[arg-type]
    rng = np.random.default_rng(batch)
    for number in range(batch):
        core._handle(AddRequest(f"cmpl-{number}", rng.integers(0, _VOCAB, PROMPT).astype(np.int32), params))
    while any(request.pending > 1 for request in scheduler._requests.values()):
        core.step()
    times = []
    for _ in range(STEPS + _UNTIMED):
        began = time.thread_time_ns()
        core.step()
        times.append((time.thread_time_ns() - began) / 1e3)
    return {"median_us": round(median(times[_UNTIMED:]), 1), "best_us": round(min(times[_UNTIMED:]), 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    kinds = {
        "greedy": SamplingParams(max_tokens=_CONTEXT, temperature=0.0),
        "penalties, logprobs": SamplingParams(
            max_tokens=_CONTEXT, temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1, logprobs=1
        ),
    }
    rows = [
        {"batch": batch, "requests": name, **measure(batch, params)}
        for name, params in kinds.items()
        for batch in options.batches
    ]
    for row in rows:
        print(row)
    if options.out:
        report = {"date": date.today().isoformat(), "prompt": PROMPT, "steps": STEPS, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
