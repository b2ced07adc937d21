"""A model of transformers' own code with Quire's attention, beside the same model on Quire's decoder.

Both run a model of Llama's shape with random weights in bfloat16, in turns: one stream, 16 streams, a prompt of 1,024
tokens. The ratios are seconds of transformers' code over those of Quire's decoder.

    python -m benchmarks.cpu.fallback --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.cpu.steps import SteppedCore
from quire.kernels import native

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
LOADS = {"one stream": (1, 64), "16 streams": (16, 16), "a prompt of 1,024 tokens": (1, 1024)}
IMPLEMENTATIONS: tuple[Literal["quire", "transformers"], ...] = ("quire", "transformers")


def measure(core: SteppedCore, load: str) -> float:
    """Return seconds of a decode step, or of the prompt."""
    batch, context = LOADS[load]
    measured = core.measure(batch, context)
    return measured["prefill" if load.startswith("a prompt") else "median"]


def main() -> None:
    """Print and save medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=tuple(LOADS), default=tuple(LOADS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    loads = arguments.loads
    seconds: dict[str, dict[str, list[float]]] = {load: {name: [] for name in IMPLEMENTATIONS} for load in loads}
    with TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16().save_pretrained(folder)
        sequences, context = (max(sizes) for sizes in zip(*LOADS.values(), strict=True))
        cores = {
            name: SteppedCore(Path(folder), "none", sequences, context, model_impl=name) for name in IMPLEMENTATIONS
        }
        for _ in range(arguments.rounds):
            for load in loads:
                for name, core in cores.items():
                    seconds[load][name].append(measure(core, load))
    rows = {}
    for load, times in seconds.items():
        quire, transformers = (median(times[name]) for name in IMPLEMENTATIONS)
        rows[load] = {"quire_ms": 1e3 * quire, "transformers_ms": 1e3 * transformers, "ratio": transformers / quire}
        rows[load] = {name: round(value, 2) for name, value in rows[load].items()}
        print(load, rows[load], flush=True)
    if arguments.out is not None:
        facts = {
            "date": date.today().isoformat(),
            "threads": torch.get_num_threads(),
            "instructions": native.instructions(),
        }
        arguments.out.write_text(json.dumps({**facts, "loads": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
