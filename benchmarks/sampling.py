"""Two methods of sampling one token for each of 16 rows of logits: inverse CDF and exponential noise (Gumbel-max).

Quire uses inverse CDF.

python -m benchmarks.sampling --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch

from quire.engine.client.sampling_params import SamplingParams
from quire.engine.execution.sampling.sampler import sample_tokens
from quire.kernels.sampling_state import uniform

ROWS, VOCAB, REPEATS = 16, 151_936, 20


def by_noise(logits: torch.Tensor) -> list[int]:
    """Sample argmax(p / e), e exponential, with a generator per row, as per-request seeds require."""
    probs = logits.softmax(-1)
    noise = torch.empty_like(probs)
    for row in range(len(noise)):
        noise[row].exponential_(generator=torch.Generator().manual_seed(row))
    return probs.div_(noise).argmax(-1).tolist()


def by_inverse(params: SamplingParams) -> Callable[[torch.Tensor], list[int]]:
    """Return our sampler with the given parameters."""
    return lambda logits: sample_tokens(logits, [params] * ROWS, [uniform(row, 0) for row in range(ROWS)])


def milliseconds(sample: Callable[[torch.Tensor], list[int]]) -> dict[str, float]:
    """Return minimum, median and maximum over the repeats, after two warm-up runs."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=generator)
    logits[:, :200] += 16 * torch.rand(ROWS, 200, generator=generator)  # as peaked as a trained model's
    times = []
    for _ in range(REPEATS + 2):
        fresh = logits.clone()
        started = time.perf_counter()
        sample(fresh)
        times.append((time.perf_counter() - started) * 1000)
    low, median, high = np.percentile(times[2:], (0, 50, 100))
    return {"min": low, "median": median, "max": high}


def main() -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    samplers = {
        "greedy": by_inverse(SamplingParams(max_tokens=1, temperature=0.0)),
        "exponential noise": by_noise,
        "inverse CDF": by_inverse(SamplingParams(max_tokens=1)),
        "inverse CDF, top-p 0.95": by_inverse(SamplingParams(max_tokens=1, top_p=0.95)),
        "inverse CDF, top-k 50": by_inverse(SamplingParams(max_tokens=1, top_k=50)),
    }
    report = {
        "date": date.today().isoformat(),
        "rows": ROWS,
        "vocabulary": VOCAB,
        "threads": torch.get_num_threads(),
        "milliseconds": {name: milliseconds(sample) for name, sample in samplers.items()},
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
