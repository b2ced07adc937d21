"""Attention kernels on a GPU, relative to the bandwidth of a copy and the rate of matrix products in the same run.

python -m benchmarks.gpu.attention measure --out benchmarks/results/FILE.json
python -m benchmarks.gpu.attention tune

`tune` measures configurations of the kernels on this GPU and stores the best in its table (see
quire/kernels/triton/tuning.py). It compiles about 70 kernels for each width and kind of pages, which takes minutes. How
many positions a split has must suit all batches, as it decides the order of sums: the geometric mean over the cases of
a shape decides.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.limits import GpuLimits, require_gpu, seconds
from benchmarks.gpu.report import Report
from quire.kernels import int8_pages

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16
CALLS = 20  # of a CUDA graph
BLOCKS_N, BLOCKS_M, SPLITS = (32, 64, 128), (64, 128), ((256, 64), (512, 32))  # that `tune` tries
HEADS = (16, 32, 64)  # of a program of `decode`, at most
WARPS, STAGES = (4, 8), (2, 3, 4)
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
VARLEN = ((256, 32), (64, 512), (8, 4096))  # sequences, tokens
PAGES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "float8": torch.float8_e4m3fn}


class Cache:
    """Pages of several layers with random contents, larger than the L2 cache, and block tables in random order."""

    def __init__(self, shape: Shape, dtype: torch.dtype, sequences: int, positions: int) -> None:
        blocks = -(-positions // BLOCK_SIZE)
        scales, value_scales = (_scale_bytes(dim, dtype) for dim in (shape.dim, shape.value_dim))
        row = (shape.dim * dtype.itemsize + scales) * shape.kv_heads
        row_of_values = 0 if shape.latent else (shape.value_dim * dtype.itemsize + value_scales) * shape.kv_heads
        self.bytes = sequences * positions * (row + row_of_values)
        self.layers = []
        for _ in range(max(2, CACHE_BYTES // self.bytes)):
            keys = _pages(shape.kv_heads, sequences * blocks, shape.dim, dtype)
            if shape.latent:
                values = keys[..., scales - value_scales : scales + shape.value_dim]
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
    scales = _scale_bytes(dim, dtype)
    header = -(-scales // 16) * 16
    rows = torch.zeros(blocks, kv_heads, BLOCK_SIZE, header + dim, dtype=torch.int8, device="cuda")
    rows[..., header:] = values.mul(30).clamp(-127, 127).to(torch.int8)
    rows[..., header - scales : header] = torch.full((scales // 4,), 1 / 30, device="cuda").view(torch.int8)
    return rows[..., header - scales :].transpose(0, 1)


def _scale_bytes(dim: int, dtype: torch.dtype) -> int:
    """Bytes of scales in front of the elements of a row."""
    return int8_pages.scale_bytes(dim) if dtype is torch.int8 else 0


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
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in itertools.islice(calls, CALLS):
            call()
    return seconds(graph.replay) / CALLS


def flops(shape: Shape, sequences: int, tokens: int, *, causal: bool) -> float:
    """Operations of the two products, of which a causal mask leaves half."""
    pairs = tokens * (tokens + 1) / 2 if causal else tokens**2
    return 2 * sequences * pairs * shape.heads * (shape.dim + shape.value_dim)


def measure(report: Report) -> None:
    """Microseconds of each kernel, and its share of the limit that it meets first."""
    for shape, (pages, dtype), (sequences, positions) in itertools.product(SHAPES, PAGES.items(), DECODE):
        case = _case("decode", shape, sequences, positions) | {"pages": pages}
        report.add(case, partial(_decode, report.limits, shape, dtype, sequences, positions))
    for shape, (pages, dtype), (spans, tokens) in itertools.product(SHAPES, PAGES.items(), PREFILL):
        case = _case("prefill", shape, spans, tokens) | {"pages": pages}
        report.add(case, partial(_prefill, report.limits, shape, dtype, spans, tokens))
    for shape, (sequences, tokens) in itertools.product(SHAPES[:3], VARLEN):
        report.add(_case("varlen", shape, sequences, tokens), partial(_varlen, report.limits, shape, sequences, tokens))


def _case(kernel: str, shape: Shape, sequences: int, tokens: int) -> dict[str, Any]:
    return {"kernel": kernel, "shape": shape.name, "sequences": sequences, "tokens": tokens}


def _decode(limits: GpuLimits, shape: Shape, dtype: torch.dtype, sequences: int, positions: int) -> dict[str, float]:
    cache = Cache(shape, dtype, sequences, positions)
    took = timed(decode_calls(shape, cache))
    rate = cache.bytes / took / 1e9
    return {
        "microseconds": round(took * 1e6, 1),
        "gb_per_s": round(rate, 1),
        "share_of_bandwidth": round(rate / limits.copy_gb_per_s, 3),  # a copy counts each byte twice: read and written
    }


def _prefill(limits: GpuLimits, shape: Shape, dtype: torch.dtype, spans: int, tokens: int) -> dict[str, float]:
    took = timed(prefill_calls(shape, Cache(shape, dtype, spans, tokens)))
    return _of_products(took, flops(shape, spans, tokens, causal=True), limits)


def _varlen(limits: GpuLimits, shape: Shape, sequences: int, tokens: int) -> dict[str, float]:
    took = timed(varlen_calls(shape, sequences, tokens))
    return _of_products(took, flops(shape, sequences, tokens, causal=False), limits)


def _of_products(took: float, operations: float, limits: GpuLimits) -> dict[str, float]:
    rate = operations / took / 1e12
    return {
        "microseconds": round(took * 1e6, 1),
        "tflops": round(rate, 1),
        "share_of_matrix_products": round(rate / limits.bf16_tflops, 3),
    }


def candidates(kernel: str) -> Iterator[dict[str, int]]:
    """Configurations of a kernel to measure."""
    for block_n, warps, stages in itertools.product(BLOCKS_N, WARPS, STAGES):
        config = {"BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}
        if kernel == "decode":
            for heads, (split, most) in itertools.product(HEADS, SPLITS):
                yield config | {"MAX_HEADS": heads, "SPLIT": split, "MAX_SPLITS": most}
        else:
            yield from (config | {"BLOCK_M": block_m} for block_m in BLOCKS_M)


def best(kernel: str, cases: Sequence[Callable[[], Iterator[Callable[[], object]]]]) -> dict[str, int] | None:
    """The configuration with the least geometric mean over the cases; those that cannot be compiled are left out."""
    from quire.kernels.triton import tuning  # noqa: PLC0415 not installed for CPUs

    times: list[tuple[float, dict[str, int]]] = []
    for config in candidates(kernel):
        with mock.patch.object(tuning, "config", lambda *_, config=config, **__: config):
            try:
                took = [timed(case()) for case in cases]
            except Exception:  # error boundary: it needs more of an SM than there is, or the compiler refuses it
                logger.exception("%s with %s", kernel, config)
                continue
        times.append((math.fsum(map(math.log, took)), config))
        print(kernel, config, [round(1e6 * time, 1) for time in took], "us", flush=True)
    return min(times, key=lambda timed_config: timed_config[0])[1] if times else None


def tune(device: torch.device, pages: Sequence[str], widths: Sequence[int]) -> None:
    """Measure configurations for some kinds of pages and widths of heads, and store the best one of each in turn."""
    import triton  # noqa: PLC0415 not installed for CPUs

    from quire.kernels.triton import tuning  # noqa: PLC0415 not installed for CPUs

    measured = {"date": date.today().isoformat(), "torch": torch.__version__, "triton": triton.__version__}
    rules: dict[str, list[Mapping[str, Any]]] = {"decode": [], "prefill": [], "varlen": []}
    of_width = {shape.width: shape for shape in SHAPES if shape.width in widths}  # the last of each
    kinds = [(number, dtype) for number, (name, dtype) in enumerate(PAGES.items()) if name in pages]
    for (page, dtype), (width, shape) in itertools.product(kinds, of_width.items()):
        of_kernel: dict[str, list[Callable[[], Iterator[Callable[[], object]]]]] = {
            "decode": [partial(decode_calls, shape, Cache(shape, dtype, *case)) for case in DECODE[1::2]],
            "prefill": [partial(prefill_calls, shape, Cache(shape, dtype, *case)) for case in PREFILL[1::2]],
        }
        if not page and not shape.latent:
            of_kernel["varlen"] = [partial(varlen_calls, shape, *case) for case in VARLEN[::2]]
        for kernel, cases in of_kernel.items():
            config = best(kernel, cases)
            if config is not None:
                key = {"width": width, "bits": 16} | ({} if kernel == "varlen" else {"page": page})
                rules[kernel].append({"shape": key, "config": config})
                print("stored", key, config, tuning.store("attention", kernel, device, rules[kernel], measured))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write a report, or tune."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "tune"), nargs="?", default="measure")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pages", choices=PAGES, nargs="*", default=["bfloat16"], help="to tune")
    parser.add_argument("--widths", type=int, nargs="*", default=[128], help="of heads, to tune")
    options = parser.parse_args(arguments)
    require_gpu("benchmarks.gpu.attention")
    torch.manual_seed(0)
    if options.command == "tune":
        tune(torch.device("cuda", torch.cuda.current_device()), options.pages, options.widths)
        return
    measure(Report(options.out))


if __name__ == "__main__":
    main()
