"""Kernels of layers with states, relative to the limits of memory bandwidth and arithmetic.

    python -m benchmarks.cpu.state_spaces --out benchmarks/results/FILE.json

The shapes are those of a layer of LFM2-350M (convolution), of Granite 4.0 H 350M (heads), of Mamba-130M (channels), and
of the gated delta rule in Qwen3.5's smallest model (delta).
A step has one token of each of 16 sequences, of one, or 512 tokens of one prompt. The floor is the time to read and
write the states, or the time of the recurrence's operations at the rate of a large matrix product, whichever is longer;
an exponential counts as 16 operations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cpu.limits import Limits, best
from quire.kernels import native
from quire.kernels.causal_conv import causal_conv
from quire.kernels.delta_gates import DeltaGates
from quire.kernels.gated_delta_rule import gated_delta_rule
from quire.kernels.selective_scan import selective_scan
from quire.kernels.state_parameters import ChannelParameters, HeadParameters
from quire.kernels.state_space_scan import state_space_scan

RUNS = 20
STEPS = ((16, 1), (1, 1), (1, 512))  # sequences, and tokens of each
HEADS, HEAD_DIM, HEAD_STATE = 48, 32, 128
CHANNELS, CHANNEL_STATE = 1536, 16
CONVOLVED, WIDTH = 1024, 3
DELTA_HEADS, DELTA_DIM = 16, 128
EXPONENTIAL = 16  # operations
Call = Callable[[], object]


def steps_of(sequences: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return slots and bounds."""
    return torch.arange(sequences), torch.arange(sequences + 1) * tokens


def random(*shape: int) -> Tensor:
    """Return bfloat16 numbers."""
    return torch.randn(*shape).bfloat16()


def convolution(sequences: int, tokens: int) -> tuple[Call, int, int]:
    """Return the call of a short convolution, the bytes of states, and operations."""
    rows = sequences * tokens
    before, after, value = random(rows, 3 * CONVOLVED).split(CONVOLVED, 1)
    state, weight = torch.zeros(sequences, WIDTH - 1, CONVOLVED), random(WIDTH, CONVOLVED).t()
    gates = {"input_gate": before, "output_gate": after}
    call = partial(causal_conv, value, weight, None, state, *steps_of(sequences, tokens), **gates)
    return call, state.nbytes, 2 * (WIDTH + 1) * rows * CONVOLVED


def heads(sequences: int, tokens: int) -> tuple[Call, int, int]:
    """Return the same of a state space of heads."""
    rows = sequences * tokens
    x, dt = random(rows, HEADS, HEAD_DIM), random(rows, HEADS)
    write, read = random(rows, 1, HEAD_STATE), random(rows, 1, HEAD_STATE)
    state = torch.zeros(sequences, HEADS, HEAD_STATE, HEAD_DIM)
    parameters = HeadParameters(torch.rand(HEADS), torch.rand(HEADS), torch.rand(HEADS))
    call = partial(state_space_scan, x, dt, write, read, parameters, state, *steps_of(sequences, tokens))
    return call, state.nbytes, 5 * rows * HEADS * HEAD_DIM * HEAD_STATE


def channels(sequences: int, tokens: int) -> tuple[Call, int, int]:
    """Return the same of a state space of channels."""
    rows = sequences * tokens
    x, dt, write, read = (
        random(rows, CHANNELS),
        random(rows, CHANNELS),
        random(rows, CHANNEL_STATE),
        random(rows, CHANNEL_STATE),
    )
    state = torch.zeros(sequences, CHANNEL_STATE, CHANNELS)
    parameters = ChannelParameters(torch.rand(CHANNEL_STATE, CHANNELS), torch.rand(CHANNELS), torch.rand(CHANNELS))
    call = partial(selective_scan, x, dt, write, read, parameters, state, *steps_of(sequences, tokens))
    return call, state.nbytes, (5 + EXPONENTIAL) * rows * CHANNELS * CHANNEL_STATE


def delta(sequences: int, tokens: int) -> tuple[Call, int, int]:
    """Return the same of the gated delta rule."""
    rows = sequences * tokens
    q, k, v = (random(rows, DELTA_HEADS, DELTA_DIM) for _ in range(3))
    decay, beta = random(rows, DELTA_HEADS, 1), random(rows, DELTA_HEADS)
    gates = DeltaGates(decay, beta, torch.zeros(DELTA_HEADS), torch.zeros(DELTA_HEADS, 1))
    state = torch.zeros(sequences, DELTA_HEADS, DELTA_DIM, DELTA_DIM)
    call = partial(gated_delta_rule, q, k, v, gates, state, *steps_of(sequences, tokens))
    return call, state.nbytes, 7 * rows * DELTA_HEADS * DELTA_DIM**2


KERNELS = {"convolution": convolution, "heads": heads, "channels": channels, "delta": delta}


def main() -> None:
    """Print and save µs of a layer's kernel, and how often its floor fits into them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    limits, rows = Limits.measured(), []
    for name, make in KERNELS.items():
        for sequences, tokens in STEPS:
            call, nbytes, operations = make(sequences, tokens)
            seconds = best(call, RUNS)
            floor = max(2 * nbytes / limits.bandwidth, operations / limits.operations)
            rows.append(
                {"kernel": name, "sequences": sequences, "tokens": tokens, "us": round(1e6 * seconds, 1),
                 "times_floor": round(seconds / floor, 2)}
            )  # fmt: skip
            print(rows[-1])
    if arguments.out is not None:
        facts = {"date": date.today().isoformat(), "threads": torch.get_num_threads(), "kernels": native.instructions(),
                 "gb_per_s": round(limits.bandwidth / 1e9, 1), "gflops": round(limits.operations / 1e9, 1)}  # fmt: skip
        arguments.out.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
