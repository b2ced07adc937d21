"""Snapshots of states in bfloat16 or int8: how answers behind them differ from answers that are computed as a whole.

    python -m benchmarks.cpu.snapshots MODEL [MODEL ...] --out benchmarks/results/FILE.json

Each prompt is answered twice: as a whole, and behind a snapshot of its last border, which is kept as float32, rounded
to bfloat16, or to int8 with a scale for each row of a state. Models compute in float32, greedily.

- texts: answers that differ, of all
- logprob: largest difference of a log-probability of the same token behind the same tokens
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.state_slots import StateSlots
from quire.engine.execution.states import StateCaches
from quire.engine.models.specs.cache import StateArray, StateCache
from tests.support.engine import Engine


def _int8(values: Tensor) -> Tensor:
    scale = values.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (values / scale).round() * scale, 0.0)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda values: values,
    "bfloat16": lambda values: values.bfloat16().float(),
    "int8": _int8,
}


def rounding(form: Callable[[Tensor], Tensor]) -> Callable[[StateCaches, int, int], None]:
    """Return what saves states in this form, in place of `StateCaches.copy_out`."""
    exact = StateCaches.copy_out

    def copy_out(caches: StateCaches, row: int, place: int) -> None:
        exact(caches, row, place)
        kinds = {
            layer: StateCache(tuple(StateArray(tuple(array.shape[1:]), "float32") for array in arrays))
            for layer, arrays in caches.slots.arrays.items()
        }
        for arrays in StateSlots(caches._saved, kinds).arrays.values():
            for array in arrays:
                array[place].copy_(form(array[place]))

    return copy_out


def measure(folder: Path, form: Callable[[Tensor], Tensor], prompts: int, answer: int) -> dict[str, Any]:
    """Return the differences of one model's answers behind snapshots of one form."""
    rng = random.Random(1)
    differ, largest, hits = 0, 0.0, 0
    params = SamplingParams(max_tokens=answer, temperature=0.0, logprobs=0)
    with patch.object(StateCaches, "copy_out", rounding(form)):
        engine = Engine(folder, kv_cache_memory_bytes=512 << 20, state_snapshot_memory="1GiB", max_num_seqs=2)
        for _ in range(prompts):
            prompt = [rng.randrange(1000, 40000) for _ in range(rng.randrange(60, 300))]
            first, second = (engine.generate(prompt, params) for _repetition in range(2))
            hits += second.outputs[0].cached_tokens > 0
            differ += first.tokens != second.tokens
            for left, right in zip(_logprobs(first), _logprobs(second), strict=True):
                if left[0] != right[0]:
                    break
                largest = max(largest, abs(left[1] - right[1]))
        engine.core.close()
    return {"prompts": prompts, "hits": hits, "texts": differ, "logprob": round(largest, 6)}


def _logprobs(result: Any) -> list[tuple[int, float]]:
    """Each token of an answer, and its log-probability."""
    entries = [entry for output in result.outputs for entry in output.logprobs or ()]
    return [(entry.token_ids[0], entry.logprobs[0]) for entry in entries]


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--answer", type=int, default=48, help="tokens")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for folder in options.models:
        for name, form in FORMS.items():
            row = {"model": folder.name, "form": name, **measure(folder, form, options.prompts, options.answer)}
            rows.append(row)
            print(row, flush=True)
    report = {"date": date.today().isoformat(), "answer": options.answer, "rows": rows}
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
