"""Attention kernels on a GPU, relative to the bandwidth of a copy and the rate of matrix products in the same run.

python -m benchmarks.gpu.attention measure --out benchmarks/results/FILE.json
python -m benchmarks.gpu.attention tune

`tune` measures configurations of the kernels on this GPU and stores the best in its table (see
quire/kernels/triton/tuning.py). How many positions a split has must suit all batches, as it decides the order of sums:
the geometric mean over the cases of a shape decides.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.limits import GpuLimits, seconds

BLOCK_SIZE = 16
CACHE_BYTES = 256 << 20  # of distinct pages to cycle through, more than the L2 cache


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a model.

    Attributes:
        latent: values are the beginning of the keys.
    """

    name: str
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    latent: bool = False

    @property
    def width(self) -> int:
        """The larger of the sizes of keys and values."""
        return max(self.dim, self.value_dim)


SHAPES = (
    Shape("GQA 32/8 x 128", 32, 8, 128, 128),
    Shape("GQA 16/8 x 128", 16, 8, 128, 128),
    Shape("MHA 16/16 x 64", 16, 16, 64, 64),
    Shape("GQA 8/4 x 256", 8, 4, 256, 256),
    Shape("latent 128/1 x 576", 128, 1, 576, 512, latent=True),
    Shape("latent 16/1 x 576", 16, 1, 576, 512, latent=True),
)
DECODE = ((1, 1024), (1, 16384), (16, 1024), (64, 1024), (64, 4096), (256, 512))  # sequences, positions
PREFILL = ((1, 512), (1, 2048), (1, 8192), (16, 512))  # spans, tokens
PAGES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "float8": torch.float8_e4m3fn}


class Cache:
    """Pages of several layers with random contents, larger than the L2 cache, and block tables in random order."""

    def __init__(self, shape: Shape, dtype: torch.dtype, sequences: int, positions: int) -> None:
        blocks = -(-positions // BLOCK_SIZE)
        extra = 4 if dtype is torch.int8 else 0
        row = (shape.dim + extra) * dtype.itemsize * shape.kv_heads
        row_of_values = 0 if shape.latent else (shape.value_dim + extra) * dtype.itemsize * shape.kv_heads
        self.bytes = sequences * positions * (row + row_of_values)
        self.layers = []
        for _ in range(max(2, CACHE_BYTES // self.bytes)):
            keys = _pages(shape.kv_heads, sequences * blocks, shape.dim, dtype)
            if shape.latent:
                values = keys[..., : shape.value_dim + extra]
            else:
                values = _pages(shape.kv_heads, sequences * blocks, shape.value_dim, dtype)
            self.layers.append((keys, values))
        order = torch.randperm(sequences * blocks, device="cuda").view(sequences, blocks)
        self.tables = order.int()
        self.lengths = torch.full((sequences,), positions, dtype=torch.int32, device="cuda")


def _pages(kv_heads: int, blocks: int, dim: int, dtype: torch.dtype) -> Tensor:
    """(kv_heads, blocks, BLOCK_SIZE, dim) pages, the heads of a block adjacent, the elements of int8 rows aligned."""
    values = torch.randn(blocks, kv_heads, BLOCK_SIZE, dim, device="cuda")
    if dtype is not torch.int8:
        return values.to(dtype).transpose(0, 1)
    rows = torch.zeros(blocks, kv_heads, BLOCK_SIZE, dim + 16, dtype=torch.int8, device="cuda")
    rows[..., 16:] = values.mul(30).clamp(-127, 127).to(torch.int8)
    rows[..., 12:16] = torch.tensor([1 / 30], device="cuda").view(torch.int8)
    return rows[..., 12:].transpose(0, 1)


def decode_calls(shape: Shape, cache: Cache) -> Iterator[Callable[[], object]]:
    """Calls of `decode`, of one layer after the other, for ever."""
    from quire.kernels.triton.paged_decode import decode  # noqa: PLC0415 not installed for CPUs

    most = cache.tables.shape[1] * BLOCK_SIZE
    q = torch.randn(len(cache.lengths), shape.heads, shape.dim, device="cuda", dtype=torch.bfloat16)
    for keys, values in itertools.cycle(cache.layers):
        yield partial(decode, q, keys, values, cache.tables, cache.lengths, max_seq_len=most, scale=shape.dim**-0.5)


def prefill_calls(shape: Shape, cache: Cache) -> Iterator[Callable[[], object]]:
    """Calls of `prefill` with all positions as queries."""
    from quire.kernels.triton.paged_prefill import prefill  # noqa: PLC0415 not installed for CPUs

    spans, tokens = len(cache.lengths), int(cache.lengths[0])
    q = torch.randn(spans * tokens, shape.heads, shape.dim, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(spans + 1, dtype=torch.int32, device="cuda") * tokens
    for keys, values in itertools.cycle(cache.layers):
        yield partial(prefill, q, keys, values, cache.tables, cache.lengths, starts, scale=shape.dim**-0.5)


def varlen_calls(shape: Shape, sequences: int, tokens: int) -> Iterator[Callable[[], object]]:
    """Calls of encoders' attention."""
    from quire.kernels.triton.varlen_attention import varlen_attention  # noqa: PLC0415 not installed for CPUs

    q, k, v = (
        torch.randn(sequences * tokens, heads, shape.dim, device="cuda", dtype=torch.bfloat16)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    starts = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * tokens
    while True:
        yield partial(varlen_attention, q, k, v, starts, scale=shape.dim**-0.5)


def timed(calls: Iterator[Callable[[], object]]) -> float:
    """Seconds of one call on the device: launched from a CUDA graph, so that Python takes no part."""
    for call in itertools.islice(calls, 3):
        call()
    count = 20
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in itertools.islice(calls, count):
            call()
    return seconds(graph.replay) / count


def flops(shape: Shape, sequences: int, tokens: int, *, causal: bool) -> float:
    """Operations of the two products, of which a causal mask leaves half."""
    pairs = tokens * (tokens + 1) / 2 if causal else tokens**2
    return 2 * sequences * pairs * shape.heads * (shape.dim + shape.value_dim)


def measure(limits: GpuLimits) -> list[dict[str, Any]]:
    """Microseconds of each kernel, and its share of the limit that it meets first."""
    results = []
    for shape, (pages, dtype), (sequences, positions) in itertools.product(SHAPES, PAGES.items(), DECODE):
        cache = Cache(shape, dtype, sequences, positions)
        took = timed(decode_calls(shape, cache))
        # A copy counts each byte twice: read and written.
        results.append(_result("decode", shape, sequences, positions, took, pages=pages) | {
            "gb_per_s": round(cache.bytes / took / 1e9, 1),
            "share_of_bandwidth": round(cache.bytes / took / 1e9 / limits.copy_gb_per_s, 3),
        })  # fmt: skip
    for shape, (pages, dtype), (spans, tokens) in itertools.product(SHAPES, PAGES.items(), PREFILL):
        took = timed(prefill_calls(shape, Cache(shape, dtype, spans, tokens)))
        results.append(_of_products("prefill", shape, spans, tokens, took, limits, causal=True) | {"pages": pages})
    for shape, (sequences, tokens) in itertools.product(SHAPES[:3], ((256, 32), (64, 512), (8, 4096))):
        took = timed(varlen_calls(shape, sequences, tokens))
        results.append(_of_products("varlen", shape, sequences, tokens, took, limits, causal=False))
    return results


def _result(kernel: str, shape: Shape, sequences: int, tokens: int, took: float, **more: str) -> dict[str, Any]:
    case = {"kernel": kernel, "shape": shape.name, "sequences": sequences, "tokens": tokens, **more}
    return {**case, "microseconds": round(took * 1e6, 1)}


def _of_products(
    kernel: str, shape: Shape, sequences: int, tokens: int, took: float, limits: GpuLimits, *, causal: bool
) -> dict[str, Any]:
    rate = flops(shape, sequences, tokens, causal=causal) / took / 1e12
    result = _result(kernel, shape, sequences, tokens, took)
    return {**result, "tflops": round(rate, 1), "share_of_matrix_products": round(rate / limits.bf16_tflops, 3)}


def candidates(kernel: str) -> Iterator[dict[str, int]]:
    """Configurations of a kernel to measure."""
    splits = [(256, 64), (512, 32), (1024, 32)] if kernel == "decode" else [(0, 0)]
    rows = [16, 32, 64] if kernel == "decode" else [64, 128]
    for block_m, block_n, (split, most), warps, stages in itertools.product(
        rows, (16, 32, 64, 128), splits, (4, 8), (2, 3, 4, 5)
    ):
        config = {"BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}
        of_decode = {"MAX_HEADS": block_m, "SPLIT": split, "MAX_SPLITS": most}
        yield config | (of_decode if kernel == "decode" else {"BLOCK_M": block_m})


def best(kernel: str, cases: Sequence[Callable[[], Iterator[Callable[[], object]]]]) -> dict[str, int] | None:
    """The configuration with the least geometric mean over the cases; those that do not fit into an SM are left out."""
    from triton.runtime.errors import OutOfResources  # noqa: PLC0415 not installed for CPUs

    from quire.kernels.triton import tuning  # noqa: PLC0415 not installed for CPUs

    times: list[tuple[float, dict[str, int]]] = []
    for config in candidates(kernel):
        with mock.patch.object(tuning, "config", lambda *_, config=config, **__: config):
            try:
                took = [timed(case()) for case in cases]
            except OutOfResources:
                continue
        times.append((math.fsum(map(math.log, took)), config))
    return min(times, key=lambda timed_config: timed_config[0])[1] if times else None


def tune(device: torch.device) -> None:
    """Measure all configurations and store the best of each shape."""
    import triton  # noqa: PLC0415 not installed for CPUs

    from quire.kernels.triton import tuning  # noqa: PLC0415 not installed for CPUs

    measured = {"date": date.today().isoformat(), "torch": torch.__version__, "triton": triton.__version__}
    rules: dict[str, list[Mapping[str, Any]]] = {"decode": [], "prefill": [], "varlen": []}
    widths = {shape.width: shape for shape in SHAPES}  # the last of each
    for (pages, dtype), (width, shape) in itertools.product(enumerate(PAGES.values()), widths.items()):
        of_kernel: dict[str, list[Callable[[], Iterator[Callable[[], object]]]]] = {
            "decode": [partial(decode_calls, shape, Cache(shape, dtype, *case)) for case in DECODE[1::2]],
            "prefill": [partial(prefill_calls, shape, Cache(shape, dtype, *case)) for case in PREFILL[1::2]],
        }
        if not pages and not shape.latent:
            of_kernel["varlen"] = [partial(varlen_calls, shape, *case) for case in ((256, 32), (8, 2048))]
        for kernel, cases in of_kernel.items():
            config = best(kernel, cases)
            if config is not None:
                key = {"width": width, "bits": 16} | ({} if kernel == "varlen" else {"page": pages})
                rules[kernel].append({"shape": key, "config": config})
                print(kernel, key, config, flush=True)
    for kernel, of_one in rules.items():
        print("stored", tuning.store("attention", kernel, device, of_one, measured))


def main() -> None:
    """Measure and print a report, or tune."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "tune"), nargs="?", default="measure")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu.attention needs a CUDA GPU, and this machine has none that torch can use")
    torch.manual_seed(0)
    if options.command == "tune":
        tune(torch.device("cuda", torch.cuda.current_device()))
        return
    limits = GpuLimits.measured()
    report = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "limits": limits.as_dict(),
        "results": measure(limits),
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
