"""CPU time of an engine step outside the model: scheduling, block tables, block hashes, sampling stages, messages.

A stub model returns constant logits over a small vocabulary. The time is the CPU time of the engine thread.

    python -m benchmarks.cpu.bookkeeping --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.config.options import EngineOptions
from quire.engine.client.protocol import AddRequest
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.core.loop import EngineCore
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.execution.devices.host import CpuDevice
from quire.engine.execution.executor import BackgroundExecutor
from quire.engine.execution.item_encoder import NoItemEncoder
from quire.engine.execution.pooling import hidden_states
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.runner import ModelRunner
from quire.engine.execution.sampling.sampler import Sampler
from quire.engine.execution.step_graphs import EagerSteps
from quire.engine.models.layers.inputs import ModelInputs, StepAttention, StepCrossAttention
from quire.engine.models.specs.cache import CacheGroup, CacheShape, FullCache
from quire.engine.scheduling.blocks import BlockPool, hasher_named
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.scheduler import Scheduler

STEPS = 300
PROMPT = 256
_WARMUP_STEPS = 20
_VOCAB, _BLOCK, _CONTEXT = 1024, 16, 1024


class ConstantModel:
    """A stub model whose logits are constant; their argmax is token 7."""

    caches: Mapping[int, CacheShape] = {0: CacheShape(1, 32, 32)}
    vocab_size = _VOCAB
    rope_switch: int | None = None

    def __init__(self) -> None:
        self._logits = torch.zeros(PROMPT, _VOCAB)
        self._logits[:, 7] = 1.0

    @property
    def lm_head(self) -> ConstantModel:
        """The model itself."""
        return self

    def run(
        self,
        inputs: ModelInputs,
        attend: StepAttention,
        *,
        last_token_only: bool = False,
        cross: StepCrossAttention | None = None,
    ) -> Tensor:
        """Return constant hidden states, which are the logits."""
        indices = inputs.logits_indices
        return self._logits[: len(inputs.token_ids if indices is None else indices)]

    def logits(self, hidden: Tensor, *, rows: Tensor | slice | None = None, out: Tensor | None = None) -> Tensor:
        """Return the hidden states."""
        return hidden

    def cache_groups(self, context_len: int) -> tuple[CacheGroup, ...]:
        """Return one group."""
        return (CacheGroup(FullCache(), (0,)),)

    def set_context(self, context_len: int) -> None:
        """Do nothing: the model has no position embedding."""


class DiscardingChannel:
    """A stub transport that encodes messages and discards them."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: Any) -> None:
        """Encode the message, discard the result."""
        self._encode(message)

    def receive(self, _: float | None) -> None:
        """Return None: there are no messages."""

    def receive_arrived(self, *_: type) -> None:
        """Return None: there are no messages."""


def measure(batch: int, params: SamplingParams) -> dict[str, float]:
    """Return microseconds of a decode step of ``batch`` sequences: median and fastest."""
    model = ConstantModel()
    blocks = batch * _CONTEXT // _BLOCK
    table = RequestTable(batch, _CONTEXT, _BLOCK)
    device = CpuDevice()
    cache = device.allocate_cache(
        CacheLayout(model.caches, model.cache_groups(_CONTEXT)), blocks, _BLOCK, torch.bfloat16, 0, 0
    )
    attention = device.attention(cache, table, model, torch.bfloat16, EngineOptions())
    inputs, sampler = device.input_builder(table, EngineOptions()), Sampler(table, _VOCAB)
    steps = EagerSteps(model)
    runner = ModelRunner(model, inputs, attention, steps, table, sampler, hidden_states(), NoItemEncoder())
    limits = SchedulerLimits(max_num_seqs=batch, max_num_batched_tokens=max(1024, batch), max_model_len=_CONTEXT)
    scheduler = Scheduler(limits, BlockPool(blocks, _BLOCK), hasher=hasher_named("sha256"))
    executor = BackgroundExecutor(device.activate, runner, 1, cache)
    core = EngineCore(scheduler, executor, DiscardingChannel(), vocab_size=_VOCAB)  # type: ignore[arg-type]
    rng = np.random.default_rng(batch)
    for number in range(batch):
        core._handle(AddRequest(f"cmpl-{number}", rng.integers(0, _VOCAB, PROMPT).astype(np.int32), params))
    while any(request.num_new_tokens(_CONTEXT) > 1 for request in scheduler._requests.values()):
        core.step()
    times = []
    for _ in range(STEPS + _WARMUP_STEPS):
        started = time.thread_time_ns()
        core.step()
        times.append((time.thread_time_ns() - started) / 1e3)
    return {"median_us": round(median(times[_WARMUP_STEPS:]), 1), "best_us": round(min(times[_WARMUP_STEPS:]), 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    params_by_name = {
        "greedy": SamplingParams(max_tokens=_CONTEXT, temperature=0.0),
        "penalties, logprobs": SamplingParams(
            max_tokens=_CONTEXT, temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1, logprobs=1
        ),
    }
    rows = [
        {"batch": batch, "requests": name, **measure(batch, params)}
        for name, params in params_by_name.items()
        for batch in options.batches
    ]
    for row in rows:
        print(row)
    if options.out:
        report = {"date": date.today().isoformat(), "prompt": PROMPT, "steps": STEPS, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
