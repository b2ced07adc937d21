"""Decode steps with a JSON schema (structured outputs) and without, in alternation.

python -m benchmarks.cpu.masks MODEL --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import wait
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from benchmarks.cpu.steps import SteppedCore, decode_seconds
from quire.engine.client.protocol import Abort, AddRequest
from quire.engine.client.sampling_params import SamplingParams
from quire.parsing.structured.constraint import grammar_of
from quire.protocol.structured import StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 100,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "email": {"type": "string"}},
                "required": ["name", "age", "email"],
            },
        }
    },
    "required": ["people"],
}
ROUNDS = 5
STEPS = 100
_PROMPT = 128
_WARMUP_STEPS = 3


def run(steps: SteppedCore, batch: int, name: str, params: SamplingParams) -> list[float]:
    """Return seconds of each decode step of a batch with these sampling parameters."""
    core, rng = steps.core, np.random.default_rng(0)
    names = [f"{name}-{number}" for number in range(batch)]
    for number, request in enumerate(names):
        prompt = rng.integers(10, 1000, _PROMPT).astype(np.int32)
        core._handle(AddRequest(request, prompt, msgspec.structs.replace(params, seed=number)))
    wait(prepared for _, prepared in core._preparing)
    core._add_prepared()
    assert len(core.scheduler._requests) == batch, "the grammar was rejected"
    while not steps.channel.started_requests.issuperset(names):
        core.step()
    decode_seconds(core, steps.channel, _WARMUP_STEPS)
    times = decode_seconds(core, steps.channel, STEPS)
    core._handle(Abort(names))
    core.step()
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    steps = SteppedCore(options.model, "none", options.batch, _PROMPT)
    free = SamplingParams(
        max_tokens=_WARMUP_STEPS + STEPS + 8, temperature=1.0, eos_token_ids=(steps.info.vocab_size - 1,)
    )
    held = msgspec.structs.replace(free, grammar=grammar_of(StructuredOutputs.model_validate({"json": SCHEMA}), {}))
    seconds: dict[str, list[float]] = {"free": [], "held": []}
    for number in range(ROUNDS):
        for kind, params in (("free", free), ("held", held)):
            seconds[kind] += run(steps, options.batch, f"{kind}-{number}", params)
    rates: dict[str, Any] = {f"{kind}_tokens_per_s": options.batch / median(times) for kind, times in seconds.items()}
    report = {
        "date": date.today().isoformat(),
        "model": options.model.name,
        "batch": options.batch,
        **{name: round(rate, 1) for name, rate in rates.items()},
        "ratio": round(rates["held_tokens_per_s"] / rates["free_tokens_per_s"], 3),
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
