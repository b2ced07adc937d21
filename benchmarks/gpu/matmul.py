"""Matrix products on a GPU: linear layers in all weight formats, experts and adapters, relative to measured limits.

    python -m benchmarks.gpu.matmul --out benchmarks/results/FILE.json
    python -m benchmarks.gpu.matmul --groups --out benchmarks/results/FILE.json      # weights as checkpoints have them

Weights are cycled through, so that they are not read from the GPU's cache. Calls are captured in a CUDA graph, so times
are those of the device. Products of quantized weights include the quantization of their rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks.gpu.limits import require_gpu, seconds
from benchmarks.gpu.report import Report
from quire.kernels.activation import act_and_mul
from quire.kernels.experts import run_experts
from quire.kernels.gpu_groups import format_groups
from quire.kernels.gpu_weights import GpuWeight, StackedWeights, WeightData, format_weight
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.lora import SortedRows, add_lora, sort_rows
from quire.kernels.routing import softmax_top_k

ROWS = (1, 16, 64, 512, 4096)
FORMATS = ("none", "int8", "int4", "fp8")


class GroupFormat(NamedTuple):
    """A format of checkpoints whose groups of inputs share a scale.

    Attributes:
        bits: of a code.
        group: inputs that share a scale.
        zero: the code that stands for 0; None: groups have minimums.
        table: values of codes; None: they stand for themselves.
    """

    bits: int
    group: int
    zero: int | None = 0
    table: Tensor | None = None


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4 = torch.cat((_E2M1, -_E2M1))
_NF4 = torch.distributions.Normal(0, 1).icdf(torch.linspace(0.03, 0.97, 16))  # of that kind; times do not depend on it
GROUP_FORMATS = {
    "GPTQ, groups of 128, symmetric": GroupFormat(4, 128, zero=8),
    "AWQ, groups of 128": GroupFormat(4, 128, zero=None),
    "Q4_K": GroupFormat(4, 32, zero=None),
    "NF4": GroupFormat(4, 64, table=_NF4),
    "MXFP4": GroupFormat(4, 32, table=_FP4),
    "NVFP4": GroupFormat(4, 16, table=_FP4),
    "Q8_0": GroupFormat(8, 32),
    "Q6_K": GroupFormat(8, 16),
}
GROUP_MODELS = ("Llama-3-8B", "Qwen3-30B-A3B")  # whose shapes they are measured in
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
        small, scale = a.float().to(torch.float8_e4m3fn), torch.ones((), device="cuda")
        fp8 = _rate(lambda: torch._scaled_mm(small, small.T, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16))
        return cls(bf16, int8, bf16, fp8)


def _random_groups(name: str, size_out: int, size_in: int) -> WeightData:
    """A weight in a format of checkpoints, of random codes."""
    layout = GROUP_FORMATS[name]
    scales = torch.rand(size_out, size_in // layout.group, device="cuda") * 0.01 + 0.01
    if layout.bits == 4:
        codes = torch.randint(256, (size_out, size_in // 2), dtype=torch.uint8, device="cuda")
    else:
        codes = torch.randint(-128, 128, (size_out, size_in), dtype=torch.int8, device="cuda")
    minimums = scales * -layout.zero if layout.zero else None
    if layout.zero is None:
        minimums = scales * -(torch.rand(scales.shape, device="cuda") * 8 + 4)
    groups = GroupedWeight(codes, scales, minimums, layout.table)
    return format_groups(groups, torch.bfloat16, codes.device)


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


def linear(report: Report, shape: Shape, rows: int, rates: Rates, formats: Sequence[str]) -> None:
    """Time a linear layer by PyTorch and by our kernels."""
    count = min(MAX_WEIGHTS, max(2, WEIGHT_BYTES // (2 * shape.size_in * shape.size_out)))
    weights = [torch.randn(shape.size_out, shape.size_in, device="cuda").bfloat16() for _ in range(count)]
    x = torch.randn(rows, shape.size_in, device="cuda").bfloat16()
    operations = 2 * rows * shape.size_in * shape.size_out
    moved = (rows * (shape.size_in + shape.size_out)) * x.itemsize

    def result(calls: Sequence[Callable[[], object]], nbytes: int, rate: float) -> dict[str, Any]:
        limit = max((nbytes + moved) / report.limits.copy_bytes_per_s, operations / rate)
        return _timed(calls, operations, nbytes + moved, limit)

    def quantized(quantization: str) -> dict[str, Any]:
        if quantization in GROUP_FORMATS:
            data = [_random_groups(quantization, shape.size_out, shape.size_in) for _ in weights]
        else:
            data = [format_weight(weight, quantization) for weight in weights]
        packed = [GpuWeight(weight) for weight in data]
        rate = getattr(rates, quantization, rates.none)  # groups are dequantized: products are of bfloat16
        return result([partial(weight, x, None) for weight in packed], packed[0].nbytes, rate)

    case = {**shape._asdict(), "rows": rows}
    calls = [partial(F.linear, x, weight) for weight in weights]
    report.add(case | {"kernel": "torch bfloat16"}, lambda: result(calls, weights[0].nbytes, rates.none))
    for quantization in formats:
        report.add(case | {"kernel": quantization}, partial(quantized, quantization))


def _timed(calls: Sequence[Callable[[], object]], operations: int, nbytes: int, limit: float) -> dict[str, Any]:
    taken = captured_seconds(calls)
    return {
        "microseconds": round(taken * 1e6, 2),
        "tflops": round(operations / taken / 1e12, 1),
        "gb_per_s": round(nbytes / taken / 1e9, 1),
        "share_of_limit": round(limit / taken, 3),
    }


def experts(report: Report, shape: MoEShape, rows: int, rates: Rates, formats: Sequence[str]) -> None:
    """Time a layer's experts, and its router."""
    x = torch.randn(rows, shape.hidden, device="cuda").bfloat16()
    logits = torch.randn(rows, shape.experts, device="cuda")
    chosen, weights = softmax_top_k(logits, shape.top_k, renormalize=True)
    operations = 2 * rows * shape.top_k * 3 * shape.hidden * shape.size
    used = len(chosen.unique())

    def route() -> dict[str, Any]:
        taken = captured_seconds([partial(softmax_top_k, logits, shape.top_k, renormalize=True)] * 8)
        return {"microseconds": round(taken * 1e6, 2)}

    def run(quantization: str) -> dict[str, Any]:
        stacks = (
            _stack(shape, 2 * shape.size, shape.hidden, quantization),
            _stack(shape, shape.hidden, shape.size, quantization),
        )
        call = partial(run_experts, x, *stacks, partial(act_and_mul, act="silu"), chosen, weights)
        nbytes = sum(stack.data.nbytes for stack in stacks) * used // shape.experts + 2 * x.nbytes
        limit = max(nbytes / report.limits.copy_bytes_per_s, operations / getattr(rates, quantization, rates.none))
        return {"experts_used": used, **_timed([call] * 4, operations, nbytes, limit)}

    case = {**shape._asdict(), "rows": rows}
    report.add(case | {"kernel": "router"}, route)
    for quantization in formats:
        report.add(case | {"kernel": quantization}, partial(run, quantization))


def _stack(shape: MoEShape, size_out: int, size_in: int, quantization: str) -> StackedWeights:
    stack = StackedWeights(shape.experts)
    for expert in range(shape.experts):
        if quantization in GROUP_FORMATS:
            stack.put(expert, _random_groups(quantization, size_out, size_in))
        else:
            weight = torch.randn(size_out, size_in, device="cuda").bfloat16()
            stack.put(expert, format_weight(weight, quantization))
    return stack


def adapter(shape: Shape, rows: int) -> dict[str, Any]:
    """Time the product of an adapter for all rows."""
    x, y = (torch.randn(rows, size, device="cuda").bfloat16() for size in (shape.size_in, shape.size_out))
    down, up = (torch.randn(size, device="cuda").bfloat16() for size in ((RANK, shape.size_in), (shape.size_out, RANK)))
    order = sort_rows(torch.zeros(rows, dtype=torch.int32, device="cuda"), 1)  # once for all layers of a step
    taken = captured_seconds([partial(_add, y, x, down[None], up[None], order)] * 8)
    return {"microseconds": round(taken * 1e6, 2)}


def _add(y: Tensor, x: Tensor, down: Tensor, up: Tensor, order: SortedRows) -> None:
    add_lora(y, x, down, up, order)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all shapes and write a report."""
    parser = argparse.ArgumentParser(description="matrix products on a GPU, relative to its limits")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", help="only these, e.g. Llama-3-8B")
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--groups", action="store_true", help="weights in groups, as quantized checkpoints have them")
    options = parser.parse_args(arguments)
    require_gpu("benchmarks.gpu.matmul")
    report = Report(options.out, triton=triton.__version__)
    rates = Rates.measured(report.limits.bf16_tflops * 1e12)
    report.facts["tflops_by_format"] = {name: round(rate / 1e12, 1) for name, rate in rates._asdict().items()}
    formats = [*GROUP_FORMATS] if options.groups else FORMATS
    models = options.models or (GROUP_MODELS if options.groups else {shape.model for shape in (*LINEARS, *MOES)})
    for rows in options.rows:
        for shape in LINEARS:
            if shape.model in models:
                linear(report, shape, rows, rates, formats)
                if not options.groups:
                    case = {**shape._asdict(), "rows": rows, "kernel": f"adapter of rank {RANK}"}
                    report.add(case, partial(adapter, shape, rows))
        for moe in MOES:
            if moe.model in models:
                experts(report, moe, rows, rates, formats)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
