"""The layers of an encoder with the shapes of all-MiniLM-L6-v2: our kernels on packed sequences, torch on padded ones.

python -m benchmarks.cpu.encoder --out benchmarks/results/FILE.json

Sequences of 10 to 500 tokens, sorted by length, in batches of about --batch tokens. Formats take turns in each round.
With one thread (OMP_NUM_THREADS=1) times are CPU times, so that other processes disturb them less.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cpu.limits import Limits
from quire.kernels import native
from quire.kernels.layer_norm import layer_norm
from quire.kernels.linear import PackedWeight, Quantization, pack_weight
from quire.kernels.varlen_attention import EncoderAttentionParams, varlen_attention

LAYERS, HIDDEN, HEADS, FFN = 6, 384, 12, 1536
EPS = 1e-12
LINEARS = {"qkv": (HIDDEN, 3 * HIDDEN), "out": (HIDDEN, HIDDEN), "up": (HIDDEN, FFN), "down": (FFN, HIDDEN)}


def _clock() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


@dataclass(frozen=True)
class Layer:
    """Weights (size_out, size_in) by name, biases, and the weight and bias of both norms."""

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    norms: list[tuple[Tensor, Tensor]]

    @classmethod
    def random(cls) -> Layer:
        """Random weights, in bfloat16."""
        weights = {name: (torch.randn(b, a) * a**-0.5).bfloat16() for name, (a, b) in LINEARS.items()}
        biases = {name: torch.randn(b) * 0.1 for name, (_, b) in LINEARS.items()}
        norms = [(torch.ones(HIDDEN).bfloat16(), torch.zeros(HIDDEN).bfloat16()) for _ in range(2)]
        return cls(weights, biases, norms)


class Ours:
    """The layers with compiled kernels, and the seconds that each kind of kernel takes."""

    def __init__(self, layers: Sequence[Layer], quantization: Quantization) -> None:
        self._layers = layers
        self._packed: list[dict[str, PackedWeight]] = [
            {name: _packed(weight, quantization) for name, weight in layer.weights.items()} for layer in layers
        ]
        self._params = EncoderAttentionParams((HIDDEN // HEADS) ** -0.5)
        self.seconds: dict[str, float] = defaultdict(float)

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden states (tokens, HIDDEN) after all layers."""
        offsets = torch.tensor([0, *accumulate(lengths)])
        for layer, packed in zip(self._layers, self._packed, strict=True):
            x = self._layer(x, offsets, layer, packed)
        return x

    def _layer(self, x: Tensor, offsets: Tensor, layer: Layer, packed: dict[str, PackedWeight]) -> Tensor:
        def linear(name: str, x: Tensor, act: str | None = None) -> Tensor:
            return self._timed(name, lambda: packed[name](x, layer.biases[name], act=act))

        q, k, v = linear("qkv", x).view(len(x), 3, HEADS, -1).unbind(1)
        attended = self._timed("attention", lambda: varlen_attention(q, k, v, offsets, self._params)).flatten(1)
        branch = linear("out", attended)
        x = self._timed("norm", lambda: layer_norm(branch, *layer.norms[0], EPS, x))
        branch = linear("down", linear("up", x, "gelu"))
        return self._timed("norm", lambda: layer_norm(branch, *layer.norms[1], EPS, x))

    def _timed(self, name: str, call: Callable[[], Tensor]) -> Tensor:
        started = _clock()
        out = call()
        self.seconds[name] += _clock() - started
        return out


def _packed(weight: Tensor, quantization: Quantization) -> PackedWeight:
    packed = pack_weight(weight, quantization)
    assert packed is not None, "this benchmark is of the compiled kernels"
    return packed


class Torch:
    """The layers in torch, for padded sequences."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._biases = [{name: bias.bfloat16() for name, bias in layer.biases.items()} for layer in layers]

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden states (tokens, HIDDEN) after all layers, without those of the padding."""
        longest = max(lengths)
        seen = torch.arange(longest) < torch.tensor(lengths)[:, None]
        padded = torch.zeros(len(lengths), longest, HIDDEN, dtype=x.dtype)
        padded[seen] = x
        mask = None if bool(seen.all()) else seen[:, None, None, :]
        for layer, biases in zip(self._layers, self._biases, strict=True):
            padded = self._layer(padded, mask, layer, biases)
        return padded[seen]

    def _layer(self, x: Tensor, mask: Tensor | None, layer: Layer, biases: dict[str, Tensor]) -> Tensor:
        def linear(name: str, x: Tensor) -> Tensor:
            return F.linear(x, layer.weights[name], biases[name])

        q, k, v = linear("qkv", x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = F.layer_norm(x + linear("out", attended), (HIDDEN,), *layer.norms[0], EPS)
        return F.layer_norm(x + linear("down", F.gelu(linear("up", x))), (HIDDEN,), *layer.norms[1], EPS)


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Lengths in ascending order, in batches of at most `tokens` tokens, or of one sequence."""
    batch: list[int] = []
    for length in sorted(lengths):
        if batch and sum(batch) + length > tokens:
            yield batch
            batch = []
        batch.append(length)
    yield batch


def operations(lengths: Sequence[int]) -> dict[str, int]:
    """Floating point operations of all layers, by kernel."""
    counts = {name: 2 * LAYERS * sum(lengths) * a * b for name, (a, b) in LINEARS.items()}
    return counts | {"attention": 4 * LAYERS * HIDDEN * sum(length**2 for length in lengths)}


def run(stack: Ours | Torch, steps: Sequence[tuple[Tensor, list[int]]]) -> float:
    """Seconds for all batches."""
    started = _clock()
    for x, lengths in steps:
        stack(x, lengths)
    return _clock() - started


def kernels(
    stack: Ours, total: float, counts: dict[str, int], rounds: int, batches: int, limits: Limits
) -> dict[str, dict[str, float]]:
    """Each kernel's share of the total time, µs per layer, and operations per second relative to the limit."""
    report = {}
    for name, seconds in stack.seconds.items():
        report[name] = {"share_of_time": seconds / total, "us_per_layer": seconds / rounds / batches / LAYERS * 1e6}
        if name in counts:
            report[name]["share_of_bfloat16_peak"] = counts[name] * rounds / seconds / limits.operations
    return {name: {key: round(value, 3) for key, value in figures.items()} for name, figures in report.items()}


def main() -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--batch", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen, _ = random.Random(0), torch.manual_seed(0)
    lengths = [chosen.randint(10, 500) for _ in range(options.sequences)]
    steps = [(torch.randn(sum(batch), HIDDEN).bfloat16(), batch) for batch in batches(lengths, options.batch)]
    layers = [Layer.random() for _ in range(LAYERS)]
    compiled = {"bfloat16": Ours(layers, "none"), "int8": Ours(layers, "int8")}
    stacks: dict[str, Ours | Torch] = {**compiled, "torch": Torch(layers)}
    times: dict[str, list[float]] = defaultdict(list)
    with torch.inference_mode():
        limits = Limits.measured()
        for stack in stacks.values():
            run(stack, steps[:3])
        for compiled_stack in compiled.values():
            compiled_stack.seconds.clear()
        for _ in range(options.rounds):
            for name, stack in stacks.items():
                times[name].append(run(stack, steps))
    counts = operations(lengths)
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "threads": torch.get_num_threads(),
        "instructions": native.instructions(),
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "batches": len(steps),
        "tflop_per_s": round(limits.operations / 1e12, 3),
    }
    for name, seconds in times.items():
        best = min(seconds)
        report[name] = {
            "seconds": [round(duration, 3) for duration in seconds],
            "tokens_per_s": round(sum(lengths) / best),
            "gflop_per_s": round(sum(counts.values()) / best / 1e9, 1),
            "share_of_bfloat16_peak": round(sum(counts.values()) / best / limits.operations, 3),
            "times_as_fast_as_torch": round(min(times["torch"]) / best, 2),
        }
    for name, compiled_stack in compiled.items():
        report[name]["kernels"] = kernels(compiled_stack, sum(times[name]), counts, options.rounds, len(steps), limits)
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
