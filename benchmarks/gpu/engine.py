"""Decode steps and prefill of the engine core on a GPU with random weights, beside the limits of the hardware.

The core runs without server and tokenizer. `--peer` runs transformers' generate, with a static cache and compiled, and
its continuous batching, with the same shape.

    python -m benchmarks.gpu.engine qwen3-0.6b --out FILE.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.limits import GpuLimits
from benchmarks.gpu.models import SHAPES, use_random_weights, write_folder
from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build import build_core
from quire.engine.core import EngineCore
from quire.engine.core_config import CoreConfig
from quire.engine.models.model_config import read_model_config
from quire.engine.wire.model_info import ModelInfo
from quire.engine.wire.protocol import Abort, AddRequest, StepOutput
from quire.engine.wire.sampling_params import SamplingParams

_STEPS = 128
_WARMUP_STEPS = 16
_PREFILL_TOKENS = 8192
_SPARE = 64  # tokens that the first sequences generate while others are prefilled


class RecordingChannel:
    """A stub transport that records which sequences have started to generate."""

    def __init__(self) -> None:
        self.started_requests: set[str] = set()

    def send(self, message: Any) -> None:
        """Record the requests of a step output."""
        if isinstance(message, StepOutput):
            self.started_requests.update(output.request_id for output in message.outputs)

    def receive(self, _: float | None) -> None:
        """Return None: there are no messages."""


class SteppedCore:
    """An engine core with random weights, whose steps are called directly."""

    def __init__(
        self, shape: str, folder: Path, sequences: int, context: int, engine_options: Mapping[str, Any], **model: Any
    ) -> None:
        """`engine_options`: further ones of `EngineOptions`; `model`: those of `ModelOptions`."""
        self.channel = RecordingChannel()
        engine = EngineOptions(
            max_num_seqs=sequences,
            max_num_batched_tokens=_PREFILL_TOKENS,
            enable_prefix_caching=False,
            **engine_options,
        )
        options = ModelOptions(device="cuda", max_model_len=context + _STEPS + _WARMUP_STEPS + _SPARE, **model)
        write_folder(shape, folder)
        config = CoreConfig(folder=folder, model_config=read_model_config(folder), model=options, engine=engine)
        self.core: EngineCore
        self.info: ModelInfo
        self.core, self.info = build_core(config, self.channel)  # type: ignore[arg-type]

    def add(self, batch: int, context: int, **params: Any) -> list[str]:
        """Add requests of random prompts."""
        names = [f"{batch}-{context}-{number}-{time.monotonic_ns()}" for number in range(batch)]
        rng = np.random.default_rng(context)
        for name in names:
            prompt = rng.integers(10, 1000, context).astype(np.int32)
            sampling = SamplingParams(**{"max_tokens": _STEPS + _WARMUP_STEPS + _SPARE, "temperature": 0.0, **params})
            self.core._handle(AddRequest(name, prompt, sampling))
        return names

    def prefill(self, batch: int, context: int) -> float:
        """Seconds until all of `batch` prompts have their first token."""
        names = self.add(batch, context, max_tokens=1)
        torch.cuda.synchronize()
        started = time.perf_counter()
        while not self.channel.started_requests.issuperset(names):
            self.core.step()
        torch.cuda.synchronize()
        taken = time.perf_counter() - started
        self.finish(names)
        return taken

    def decode(self, batch: int, context: int) -> dict[str, float]:
        """Seconds of a decode step, of the device within it, and of the device's wait for the next one."""
        names = self.add(batch, context)
        while not self.channel.started_requests.issuperset(names):
            self.core.step()
        for _ in range(_WARMUP_STEPS):
            self.core.step()
        with _step_events(self.core) as events:
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(_STEPS):
                self.core.step()
            torch.cuda.synchronize()
            taken = (time.perf_counter() - started) / _STEPS
        self.finish(names)
        busy = [begin.elapsed_time(end) / 1e3 for begin, end in events]
        gaps = [end.elapsed_time(begin) / 1e3 for (_, end), (begin, _) in itertools.pairwise(events)]
        return {"step": taken, "device": median(busy), "gap": median(gaps)}

    def finish(self, names: list[str]) -> None:
        """Abort requests, and run what is left of them."""
        self.core._handle(Abort(names))
        while self.core.has_work:
            self.core.step()


@contextmanager
def _step_events(core: EngineCore) -> Iterator[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Events around the work of each step, on the device."""
    runner: Any = core.executor._runner  # type: ignore[attr-defined]
    start, events = runner.start, list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    def timed(plan: Any) -> Any:
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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


def decode_floor(shape: str, info: ModelInfo, limits: GpuLimits, batch: int, context: int) -> float:
    """Seconds for reading the weights that a step needs and the KV cache once, at the speed of a copy."""
    config = SHAPES[shape]
    embedding = 0 if config["tie_word_embeddings"] else info.vocab_size * config["hidden_size"] * 2
    weights = info.weight_bytes - embedding
    if experts := config.get("num_experts", 0):
        per_expert = 3 * config["hidden_size"] * config["moe_intermediate_size"] * 2
        unused = (1 - config["num_experts_per_tok"] / experts) ** batch  # share of experts that no token chooses
        weights -= int(config["num_hidden_layers"] * experts * per_expert * unused)
    cache = batch * context * info.cache_bytes / (info.num_blocks * info.block_size)
    return float(weights + cache) / (limits.copy_gb_per_s * 1e9)


def prefill_floor(shape: str, info: ModelInfo, limits: GpuLimits, tokens: int, context: int) -> float:
    """Seconds for the products of a prefill at the rate of large matrices."""
    config = SHAPES[shape]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    parameters = info.weight_bytes / 2 - 2 * info.vocab_size * hidden
    if config["tie_word_embeddings"]:
        parameters += info.vocab_size * hidden
    if experts := config.get("num_experts", 0):
        per_expert = 3 * hidden * config["moe_intermediate_size"]
        parameters -= config["num_hidden_layers"] * (experts - config["num_experts_per_tok"]) * per_expert
    attention = 2 * config["num_hidden_layers"] * heads * dim * context  # causal: half of 4 * context
    return float(tokens * (2 * parameters + attention) / (limits.bf16_tflops * 1e12))


def measure(
    shape: str, limits: GpuLimits, batches: Sequence[int], context: int, options: Mapping[str, Any], **model: Any
) -> dict[str, Any]:
    """Measure prefill and decode of a shape at several batch sizes."""
    use_random_weights()
    with tempfile.TemporaryDirectory() as folder:
        steps = SteppedCore(shape, Path(folder), max(batches), context, options, **model)
    rows = []
    for batch in batches:
        steps.prefill(batch, context)
        prefill = min(steps.prefill(batch, context) for _ in range(2))
        times = steps.decode(batch, context)
        floors = (
            decode_floor(shape, steps.info, limits, batch, context + _STEPS // 2),
            prefill_floor(shape, steps.info, limits, batch * context, context),
        )
        rows.append(
            {
                "batch": batch,
                "context": context,
                "step_ms": round(times["step"] * 1e3, 3),
                "device_ms": round(times["device"] * 1e3, 3),
                "gap_ms": round(times["gap"] * 1e3, 3),
                "tokens_per_s": round(batch / times["step"], 1),
                "decode_floor_share": round(floors[0] / times["step"], 3),
                "prefill_tokens_per_s": round(batch * context / prefill, 1),
                "prefill_floor_share": round(floors[1] / prefill, 3),
            }
        )
        print(rows[-1], flush=True)
    return {"weight_bytes": steps.info.weight_bytes, "kv_blocks": steps.info.num_blocks, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--block-size", type=int, default=16, help="flash_attn needs 256")
    parser.add_argument("--peer", action="store_true", help="measure transformers instead of Quire")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    limits = GpuLimits.measured()
    print(limits, flush=True)
    if options.peer:
        from benchmarks.gpu.peer import measure_transformers  # noqa: PLC0415 a minute of compilation

        found = measure_transformers(options.shape, options.batches, options.context)
    else:
        engine = {"attention_backend": options.attention_backend, "block_size": options.block_size}
        quantization = options.quantization
        found = measure(options.shape, limits, options.batches, options.context, engine, quantization=quantization)
    report = {
        "date": date.today().isoformat(),
        "shape": options.shape,
        "engine": "transformers" if options.peer else "quire",
        "quantization": options.quantization,
        "attention_backend": options.attention_backend,
        "torch": torch.__version__,
        **limits.as_dict(),
        **found,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
