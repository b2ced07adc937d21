"""Matrix products on a GPU: linear layers in all weight formats, experts and adapters, relative to measured limits.

    python -m benchmarks.gpu.matmul --out benchmarks/results/FILE.json

Weights are cycled through, so that they are not read from the GPU's cache. Calls are captured in a CUDA graph, so times
are those of the device. Products of quantized weights include the quantization of their rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks.gpu.limits import GpuLimits, seconds
from quire.kernels.activation import act_and_mul
from quire.kernels.experts import run_experts
from quire.kernels.gpu_weights import GpuWeight, StackedWeights
from quire.kernels.low_rank import SortedRows, add_low_rank, sort_rows
from quire.kernels.routing import softmax_top_k

ROWS = (1, 16, 64, 512, 4096)
FORMATS = ("none", "int8", "int4", "fp8")
WEIGHT_BYTES = 512 << 20  # of distinct weights; the cache of an H100 has 50 MiB
MAX_WEIGHTS = 24
SIZE = 8192  # of the products whose rates are the limits
RANK = 16


class Shape(NamedTuple):
    """A linear layer of a model."""

    model: str
    layer: str
    size_in: int
    size_out: int


class MoEShape(NamedTuple):
    """A mixture of experts of a model."""

    model: str
    hidden: int
    size: int
    experts: int
    top_k: int


LINEARS = (
    Shape("Qwen3-0.6B", "qkv", 1024, 4096),
    Shape("Qwen3-0.6B", "out", 2048, 1024),
    Shape("Qwen3-0.6B", "gate_up", 1024, 6144),
    Shape("Qwen3-0.6B", "down", 3072, 1024),
    Shape("Llama-3-8B", "qkv", 4096, 6144),
    Shape("Llama-3-8B", "out", 4096, 4096),
    Shape("Llama-3-8B", "gate_up", 4096, 28672),
    Shape("Llama-3-8B", "down", 14336, 4096),
    Shape("Qwen3-30B-A3B", "qkv", 2048, 5120),
    Shape("Qwen3-30B-A3B", "out", 4096, 2048),
)
MOES = (MoEShape("Qwen3-30B-A3B", 2048, 768, 128, 8),)


class Rates(NamedTuple):
    """Operations per second of large products by PyTorch, by the format of the weight."""

    none: float
    int8: float
    int4: float
    fp8: float

    @classmethod
    def measured(cls, bf16: float) -> Rates:
        """Measure them; those of 4-bit weights are products of bfloat16."""
        a = torch.randint(-127, 128, (SIZE, SIZE), device="cuda", dtype=torch.int8)
        int8 = _rate(lambda: torch._int_mm(a, a.T))
        small, one = a.float().to(torch.float8_e4m3fn), torch.ones((), device="cuda")
        fp8 = _rate(lambda: torch._scaled_mm(small, small.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
        return cls(bf16, int8, bf16, fp8)


def _rate(product: Callable[[], object]) -> float:
    return 2 * SIZE**3 / seconds(product)


def captured_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of the device for one of the calls, which are replayed as a CUDA graph."""
    for call in calls[:2]:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return seconds(graph.replay) / len(calls)


def linear(shape: Shape, rows: int, bandwidth: float, rates: Rates) -> Iterator[dict[str, Any]]:
    """Time a linear layer by PyTorch and by our kernels."""
    count = min(MAX_WEIGHTS, max(2, WEIGHT_BYTES // (2 * shape.size_in * shape.size_out)))
    weights = [torch.randn(shape.size_out, shape.size_in, device="cuda").bfloat16() for _ in range(count)]
    x = torch.randn(rows, shape.size_in, device="cuda").bfloat16()
    operations = 2 * rows * shape.size_in * shape.size_out
    moved = (rows * (shape.size_in + shape.size_out)) * x.itemsize

    def result(kernel: str, calls: Sequence[Callable[[], object]], nbytes: int, rate: float) -> dict[str, Any]:
        limit = max((nbytes + moved) / bandwidth, operations / rate)
        return {**shape._asdict(), "rows": rows, **_timed(kernel, calls, operations, nbytes + moved, limit)}

    yield result("torch bfloat16", [partial(F.linear, x, weight) for weight in weights], weights[0].nbytes, rates.none)
    for quantization in FORMATS:
        packed = [GpuWeight(weight, quantization) for weight in weights]
        calls = [partial(weight, x, None) for weight in packed]
        yield result(quantization, calls, packed[0].nbytes, getattr(rates, quantization))


def _timed(
    kernel: str, calls: Sequence[Callable[[], object]], operations: int, nbytes: int, limit: float
) -> dict[str, Any]:
    taken = captured_seconds(calls)
    return {
        "kernel": kernel,
        "microseconds": round(taken * 1e6, 2),
        "tflops": round(operations / taken / 1e12, 1),
        "gb_per_s": round(nbytes / taken / 1e9, 1),
        "share_of_limit": round(limit / taken, 3),
    }


def experts(shape: MoEShape, rows: int, bandwidth: float, rates: Rates) -> Iterator[dict[str, Any]]:
    """Time a layer's experts, and its router."""
    x = torch.randn(rows, shape.hidden, device="cuda").bfloat16()
    logits = torch.randn(rows, shape.experts, device="cuda")
    chosen, weights = softmax_top_k(logits, shape.top_k, renormalize=True)
    operations = 2 * rows * shape.top_k * 3 * shape.hidden * shape.size
    used = len(chosen.unique()) / shape.experts
    route = captured_seconds([partial(softmax_top_k, logits, shape.top_k, renormalize=True)] * 8)
    yield {**shape._asdict(), "rows": rows, "kernel": "router", "microseconds": round(route * 1e6, 2)}
    for quantization in FORMATS:
        stacks = (
            _stack(shape, 2 * shape.size, shape.hidden, quantization),
            _stack(shape, shape.hidden, shape.size, quantization),
        )
        call = partial(run_experts, x, *stacks, partial(act_and_mul, act="silu"), chosen, weights)
        nbytes = int(used * sum(stack.data.nbytes for stack in stacks)) + 2 * x.nbytes
        limit = max(nbytes / bandwidth, operations / getattr(rates, quantization))
        timed = _timed(quantization, [call] * 4, operations, nbytes, limit)
        yield {**shape._asdict(), "rows": rows, "experts_used": round(used * shape.experts), **timed}


def _stack(shape: MoEShape, size_out: int, size_in: int, quantization: str) -> StackedWeights:
    stack = StackedWeights(shape.experts)
    for expert in range(shape.experts):
        stack.put(expert, torch.randn(size_out, size_in, device="cuda").bfloat16(), quantization)
    return stack


def adapter(shape: Shape, rows: int) -> dict[str, Any]:
    """Time the product of an adapter for all rows."""
    x, y = (torch.randn(rows, size, device="cuda").bfloat16() for size in (shape.size_in, shape.size_out))
    down, up = (torch.randn(size, device="cuda").bfloat16() for size in ((RANK, shape.size_in), (shape.size_out, RANK)))
    order = sort_rows(torch.zeros(rows, dtype=torch.int32, device="cuda"), 1)  # once for all layers of a step
    taken = captured_seconds([partial(_add, y, x, down[None], up[None], order)] * 8)
    return {**shape._asdict(), "rows": rows, "kernel": f"adapter of rank {RANK}", "microseconds": round(taken * 1e6, 2)}


def _add(y: Tensor, x: Tensor, down: Tensor, up: Tensor, order: SortedRows) -> None:
    add_low_rank(y, x, down, up, order)


def main() -> None:
    """Measure all shapes and write a report."""
    parser = argparse.ArgumentParser(description="matrix products on a GPU, relative to its limits")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", help="only these, e.g. Llama-3-8B")
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu.matmul measures a CUDA device, and PyTorch finds none")
    limits = GpuLimits.measured()
    rates, bandwidth = Rates.measured(limits.bf16_tflops * 1e12), limits.copy_gb_per_s * 1e9
    results: list[dict[str, Any]] = []
    for rows in arguments.rows:
        for shape in LINEARS:
            if not arguments.models or shape.model in arguments.models:
                results += linear(shape, rows, bandwidth, rates)
                results.append(adapter(shape, rows))
        for moe in MOES:
            if not arguments.models or moe.model in arguments.models:
                results += experts(moe, rows, bandwidth, rates)
        torch.cuda.empty_cache()
    report = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "limits": {**limits.as_dict(), "tflops_by_format": {k: round(v / 1e12, 1) for k, v in rates._asdict().items()}},
        "results": results,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{len(results)} results in {arguments.out}")


if __name__ == "__main__":
    main()
