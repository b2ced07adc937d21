"""What a step does with states beside the layers' computation: 20 MiB a sequence, as a hybrid of 0.8B parameters has.

    python -m benchmarks.cpu.states --out benchmarks/results/FILE.json

- in place: slots are found, and layers get their arrays
- copied: layers get copies of all states and return new ones, which are stored, as those of speech models do
- drafts: each sequence has one, whose states are changed in a spare slot
- begins: each sequence begins, with zeros
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import torch

from quire.engine.execution.inputs import Span
from quire.engine.execution.state_slots import StateSlots, slot_bytes
from quire.engine.execution.states import StateCaches
from quire.engine.models.specs.cache import StateArray, StateCache

ROUNDS = 30
# Layers with a gated delta rule: 16 heads of 128 x 128, and the inputs of a convolution.
LAYERS = 18
KIND = StateCache((StateArray((3, 6144), "float32"), StateArray((16, 128, 128), "float32")))


def spans(sequences: int, *, start: int = 100, draft: int = 0) -> list[Span]:
    """Return one span for each sequence."""
    count = 1 + draft
    return [Span(row, row * count, start, count, True, True, (0,) * draft) for row in range(sequences)]


def in_place(states: StateCaches, sequences: int) -> None:
    """Run a step whose layers change nothing."""
    step = states.of_step(spans(sequences))
    for layer in range(LAYERS):
        step.arrays(layer)
    step.commit()


def copied(states: StateCaches, sequences: int) -> None:
    """Run a step whose layers write what they have read."""
    step = states.of_step(spans(sequences))
    for layer in range(LAYERS):
        step.write(layer, step.read(layer))
    step.commit()


def drafts(states: StateCaches, sequences: int) -> None:
    """Run a step with rejected drafts."""
    states.of_step(spans(sequences, draft=4))
    for row in range(sequences):
        states.verified(row, 0)


def begins(states: StateCaches, sequences: int) -> None:
    """Run a step of sequences that begin."""
    states.of_step(spans(sequences, start=0))


STEPS: dict[str, Callable[[StateCaches, int], None]] = {
    "in place": in_place,
    "copied": copied,
    "drafts": drafts,
    "begins": begins,
}


def milliseconds(step: Callable[[], None]) -> float:
    """Return the median time of a step."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return round(1e3 * median(times[3:]), 3)


def main() -> None:
    """Print and save milliseconds of steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    kinds, rows = dict.fromkeys(range(LAYERS), KIND), max(arguments.sequences)
    states = StateCaches(StateSlots(torch.zeros(2 * rows, slot_bytes(kinds), dtype=torch.uint8), kinds), rows)
    results: dict[str, dict[str, float]] = {}
    for name, step in STEPS.items():
        results[name] = {str(count): milliseconds(partial(step, states, count)) for count in arguments.sequences}
        print(f"{name:10}", *(f"{count:>4} sequences: {value:8.3f} ms" for count, value in results[name].items()))
    if arguments.out is not None:
        facts = {"date": date.today().isoformat(), "threads": torch.get_num_threads(), "bytes": slot_bytes(kinds)}
        arguments.out.write_text(json.dumps({**facts, "milliseconds": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
