"""Decode steps and prefill of the engine core on a GPU with random weights, beside the limits of the hardware.

The core runs without server and tokenizer. `--peer` runs transformers' generate, with a static cache and compiled, and
its continuous batching, with the same shape.

    python -m benchmarks.gpu.engine llama-3-8b --out gpu-llama-3-8b.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu.floors import NO_STATES, States, decode_floors, prefill_floor
from benchmarks.gpu.limits import GpuLimits, keep_busy, require_gpu
from benchmarks.gpu.models import GENERATED, SHAPES, use_random_weights, write_folder
from benchmarks.gpu.report import Report
from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.engine import build_core
from quire.engine.client.model_info import ModelInfo
from quire.engine.client.protocol import Abort, AddRequest, ErrorOutput, StepOutput
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.core.loop import EngineCore
from quire.engine.models.model_config import read_model_config

_STEPS = 128
_DEVICE_STEPS = 24  # steps whose time on the device is measured
_WARMUP_STEPS = 16
_SPARE = 64  # tokens that the first sequences generate while others are prefilled
_MAX_TOKENS = _STEPS + _DEVICE_STEPS + _WARMUP_STEPS + _SPARE
_PREFILL_TOKENS = 8192
_HOLD = 0.005  # seconds; more than the host needs to submit a step


class Case(NamedTuple):
    """Sequences that run together, and the tokens of each prompt."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read a case such as "64x2048"."""
        batch, context = text.split("x")
        return cls(int(batch), int(context))


CASES = (Case(1, 512), Case(64, 2048), Case(64, 512), Case(16, 512))
PEER_CASES = (Case(64, 512), Case(1, 512))


class RecordingChannel:
    """A stub transport that records which sequences have started to generate."""

    inbox = None  # no messages arrive

    def __init__(self) -> None:
        self.started_requests: set[str] = set()

    def send(self, message: Any) -> None:
        """Record the requests of a step output.

        Raises:
            RuntimeError: a request has failed, so that times would be those of nothing.
        """
        for output in message.outputs if isinstance(message, StepOutput) else ():
            if isinstance(output, ErrorOutput):
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            self.started_requests.add(output.request_id)

    def receive(self, _: float | None) -> None:
        """Return None: there are no messages."""

    def receive_arrived(self, *_: type) -> None:
        """Return None: there are no messages."""


class SteppedCore:
    """An engine core with random weights, whose steps are called directly.

    Attributes:
        graphs: number of CUDA graphs that were captured.
        states: those of sequences, besides keys and values.
        added: all requests so far.
        failed_steps: steps that failed and were tried again, so that times are not those of steps.
    """

    def __init__(self, shape: str, folder: Path, cases: Sequence[Case], **model: Any) -> None:
        self.channel = RecordingChannel()
        tokens = max(case.context for case in cases) + _MAX_TOKENS
        engine = EngineOptions(
            max_num_seqs=max(case.batch for case in cases),
            max_num_batched_tokens=_PREFILL_TOKENS,
            enable_prefix_caching=False,
        )
        options = ModelOptions(device="cuda", max_model_len=tokens, **model)
        write_folder(shape, folder)
        config = CoreConfig(folder=folder, model_config=read_model_config(folder), model=options, engine=engine)
        self.core: EngineCore
        self.info: ModelInfo
        self.core, self.info = build_core(config, self.channel)  # type: ignore[arg-type]
        self.runner: Any = self.core.executor._runner  # type: ignore[attr-defined]
        self._retry = self.runner._execute_alone
        self.runner._execute_alone = self._note_retry
        self.graphs = len(getattr(self.runner.steps, "graphs", ()))
        states = self.runner._states
        self.states = NO_STATES if states is None else States(*states.slots.memory.shape)
        self.added: list[str] = []
        self.failed_steps = 0

    def _note_retry(self, *step: Any) -> None:
        """A step has failed, and its sequences are computed one by one."""
        self.failed_steps += 1
        self._retry(*step)

    def add(self, case: Case, max_tokens: int) -> list[str]:
        """Add requests of random prompts."""
        names = [f"{case}-{number}-{time.monotonic_ns()}" for number in range(case.batch)]
        rng = np.random.default_rng(case.context)
        for name in names:
            prompt = rng.integers(10, 1000, case.context).astype(np.int32)
            self.core._handle(AddRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0)))
        self.added += names
        return names

    def prefill(self, case: Case) -> float:
        """Seconds until all prompts have their first token."""
        names = self.add(case, max_tokens=1)
        with _timed() as taken:
            self._start(names)
        self.finish(names)
        return taken()

    def generate(self, case: Case) -> float:
        """Seconds until all requests have generated `GENERATED` tokens, their prompts included."""
        self.add(case, max_tokens=GENERATED)
        with _timed() as taken:
            while self.core.has_work:
                self.core.step()
        return taken()

    def decode(self, case: Case) -> dict[str, float]:
        """Seconds of a decode step, and of the device in it."""
        names = self.add(case, _MAX_TOKENS)
        self._start(names)
        for _ in range(_WARMUP_STEPS):
            self.core.step()
        with _timed() as taken:
            for _ in range(_STEPS):
                self.core.step()
        with _held_steps(self.runner) as events:
            for _ in range(_DEVICE_STEPS):
                self.core.step()
            torch.cuda.synchronize()
        self.finish(names)
        device = median(begin.elapsed_time(end) / 1e3 for begin, end in events)
        return {"step": taken() / _STEPS, "device": device}

    def _start(self, names: list[str]) -> None:
        """Run steps until all of these requests generate."""
        while not self.channel.started_requests.issuperset(names):
            if not self.core.has_work:
                raise RuntimeError("requests have ended without a token")
            self.core.step()

    def finish(self, names: list[str]) -> None:
        """Abort requests, and run what is left of them."""
        self.core._handle(Abort(names))
        while self.core.has_work:
            self.core.step()


@contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    """Gives a function that returns the seconds of the block, the work of the device included."""
    torch.cuda.synchronize()
    started, ended = time.perf_counter(), list[float]()
    yield lambda: ended[0] - started
    torch.cuda.synchronize()
    ended.append(time.perf_counter())


@contextmanager
def _held_steps(runner: Any) -> Iterator[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Events around the work of each step on the device, which begins it when the host has submitted all of it."""
    start, events = runner.start, list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    def timed(plan: Any) -> Any:
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        keep_busy(_HOLD)
        pair[0].record()
        started = start(plan)
        pair[1].record()
        events.append(pair)
        return started

    runner.start = timed
    try:
        yield events
    finally:
        del runner.start


def measure_case(steps: SteppedCore, shape: str, limits: GpuLimits, case: Case) -> dict[str, Any]:
    """Prefill, decode and both together of one case."""
    failed_before = steps.failed_steps
    steps.prefill(case)
    prefill = min(steps.prefill(case) for _ in range(2))
    times = steps.decode(case)
    together = min(steps.generate(case) for _ in range(2))
    if steps.failed_steps > failed_before:
        raise RuntimeError("a step failed; the log says why")
    context = case.context + _WARMUP_STEPS + _STEPS // 2
    floors = decode_floors(shape, steps.info, limits, case.batch, context, steps.states)
    tokens = case.batch * case.context
    return {
        "step_ms": round(times["step"] * 1e3, 3),
        "device_ms": round(times["device"] * 1e3, 3),
        "gap_us": round((times["step"] - times["device"]) * 1e6, 1),
        "tokens_per_s": round(case.batch / times["step"], 1),
        "weights_share": round(floors.weights / times["step"], 3),
        "decode_floor_share": round(floors.larger / times["step"], 3),
        "prefill_tokens_per_s": round(tokens / prefill, 1),
        "prefill_floor_share": round(prefill_floor(shape, limits, tokens, case.context) / prefill, 3),
        "tokens_per_s_with_prefill": round(case.batch * GENERATED / together, 1),
    }


def measure_quire(report: Report, shape: str, cases: Sequence[Case], **model: Any) -> None:
    """Measure the engine."""
    use_random_weights()
    with tempfile.TemporaryDirectory() as folder:
        steps = SteppedCore(shape, Path(folder), cases, **model)
    report.facts |= {"weight_bytes": steps.info.weight_bytes, "kv_blocks": steps.info.num_blocks}
    report.facts |= {"graphs": steps.graphs, "state_bytes": steps.states.nbytes}
    for case in cases:
        report.add(case._asdict(), partial(measure_case, steps, shape, report.limits, case))
        steps.finish(steps.added)  # if it failed


def measure_transformers(report: Report, shape: str, cases: Sequence[Case]) -> None:
    """Measure transformers."""
    from benchmarks.gpu.peer import Transformers  # noqa: PLC0415 seconds of imports

    model = Transformers(shape)
    for case in cases:
        report.add(case._asdict(), partial(model.measure, *case))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--cases", type=Case.parse, nargs="*", help="sequences x tokens of a prompt, such as 64x2048")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--peer", action="store_true", help="measure transformers instead of Quire")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    require_gpu("benchmarks.gpu.engine")
    cases = options.cases or (PEER_CASES if options.peer else CASES)
    if options.peer:
        measure_transformers(Report(options.out, shape=options.shape, engine="transformers"), options.shape, cases)
        return
    report = Report(options.out, shape=options.shape, engine="quire", quantization=options.quantization)
    measure_quire(report, options.shape, cases, quantization=options.quantization)


if __name__ == "__main__":
    main()
