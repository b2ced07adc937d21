"""Processor time of a prompt's tokens by its length, and the states of a sequence.

The engine core runs without server and tokenizer. Steps have the token budget of a server, 512. Processor time, rather
than seconds, so that other processes change it less. What grows with the length is attention; everything else of a
hybrid costs the same for each token. Prompts of all lengths take turns, short ones more often, so that each number is
of at least 16,384 tokens. Before that, much shorter prompts, replayed and without replays in turns.

python -m benchmarks.cpu.prompts MODEL --quantization int8 --length 32768 --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.cpu.steps import SteppedCore
from quire.engine.client.protocol import Abort, AddRequest
from quire.engine.client.sampling_params import SamplingParams
from quire.kernels import native

WINDOW = 1024  # last tokens of a prompt whose time is reported
SHORT, SHORT_RUNS = (17, 33), 12  # tokens of short prompts
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
ROUNDS, ROUND_TOKENS = 2, 8192  # tokens of prompts of a length in a round, at least


def measure(steps: SteppedCore, length: int) -> tuple[list[float], list[float]]:
    """Return seconds and processor seconds of the steps that compute a prompt."""
    steps.channel.started_requests.clear()
    prompt = np.random.default_rng(0).integers(1000, 15000, length).astype(np.int32)
    steps.core._handle(AddRequest("prompt", prompt, SamplingParams(max_tokens=1, temperature=0.0)))
    seconds, processor = [], []
    while "prompt" not in steps.channel.started_requests:
        started, used = time.perf_counter(), time.process_time()
        steps.core.step()
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    steps.core._handle(Abort(["prompt"]))
    while steps.core.has_work:
        steps.core.step()
    return seconds, processor


def replays(steps: SteppedCore, length: int) -> dict[str, float]:
    """Return the first quartiles of the processor milliseconds of a short prompt with replays and without."""
    replayed, eager = [], []
    for _ in range(SHORT_RUNS):
        replayed.append(sum(measure(steps, length)[1]))
        with steps.eager():
            eager.append(sum(measure(steps, length)[1]))
    fast, slow = (sorted(times)[SHORT_RUNS // 4] for times in (replayed, eager))
    return {"tokens": length, "cpu_ms": round(1e3 * fast, 1), "eager_cpu_ms": round(1e3 * slow, 1),
            "ratio": round(fast / slow, 2)}  # fmt: skip


def main() -> None:
    """Measure, print the report and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8"))
    parser.add_argument("--length", type=int, default=LENGTHS[-1])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    steps = SteppedCore(options.model, options.quantization, 2, options.length, options.kv_cache_dtype)
    for _ in range(6):  # what first prompts cost
        measure(steps, WINDOW // 2)
    short = [replays(steps, length) for length in SHORT]
    print(short)
    lengths = [length for length in LENGTHS if length <= options.length]
    samples: list[list[tuple[float, float, float]]] = [[] for _ in lengths]
    for _ in range(ROUNDS):
        for length, measured in zip(lengths, samples, strict=True):
            for _ in range(max(1, ROUND_TOKENS // length)):
                seconds, processor = measure(steps, length)
                budget = length // len(seconds)
                last = sum(processor[-WINDOW // budget :]) / WINDOW
                measured.append((sum(processor) / length, last, length / sum(seconds)))
    rows = []
    for length, measured in zip(lengths, samples, strict=True):
        per_token, last, speed = (median(values) for values in zip(*measured, strict=True))
        rows.append(
            {
                "tokens": length,
                "prompts": len(measured),
                "cpu_ms_per_token": round(1e3 * per_token, 3),
                "cpu_ms_per_last_token": round(1e3 * last, 3),
                "tokens_per_s": round(speed, 1),
            }
        )
        print(rows[-1])
    cache = steps.core.executor.cache
    slots = None if cache is None else cache.states
    report = {
        "date": date.today().isoformat(),
        "model": options.model.name,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "threads": torch.get_num_threads(),
        "instructions": native.instructions(),
        "tokens_of_a_step": budget,
        "state_bytes_of_a_sequence": 0 if slots is None else slots.memory.shape[1],
        "cache_bytes_of_a_token": 0
        if cache is None or slots is None
        else round((steps.info.cache_bytes - slots.memory.numel()) / (steps.info.num_blocks * steps.info.block_size)),
        "growth": round(rows[-1]["cpu_ms_per_token"] / rows[0]["cpu_ms_per_token"], 2),
        "short": short,
        "rows": rows,
    }
    print({name: value for name, value in report.items() if name != "rows"})
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
