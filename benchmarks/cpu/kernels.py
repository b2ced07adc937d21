"""Linear layers, products of heads and attention, relative to the limits of memory bandwidth and arithmetic.

python -m benchmarks.cpu.kernels --parts grouped prefill --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.limits import Limits, timed
from quire.engine.execution.cache import HostKVCache
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.models.specs.cache import CacheGroup, CacheShape, FullCache
from quire.kernels import native
from quire.kernels.capture import CapturedCalls, RowKind, Workspace
from quire.kernels.grouped import pack_groups
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.head_linear import pack_head_weight, reference
from quire.kernels.linear import PackedWeight, Quantization, pack_weight
from quire.kernels.paged_attention import AttentionMetadata, AttentionParams, paged_decode, paged_varlen
from quire.kernels.selected_attention import TokenPlaces, attend_selected, select_positions

SHAPES = ((1024, 6144), (3072, 1024))  # inputs and outputs
ROWS = (1, 4, 16, 64, 256, 1024)
FORMATS: tuple[Quantization, ...] = ("none", "int8", "int4")
WEIGHT_BYTES = 200 << 20  # bytes of distinct weights to cycle through, so that they are not read from CPU caches
CASES = (  # sequences, positions, heads, kv_heads, dim
    (16, 128, 16, 8, 128),
    (16, 512, 16, 8, 128),
    (1, 4096, 16, 8, 128),
    (16, 256, 12, 4, 64),
    (64, 512, 16, 8, 128),
)
HEADS = ((16, 128, 512), (16, 512, 128))  # heads, inputs and outputs: queries into a latent space, values out of it
PREFILLS = (  # tokens at the end of so many positions, heads, kv_heads, dim
    (1000, 1000, 9, 3, 64),
    (1000, 1000, 16, 8, 128),
    (512, 8192, 16, 8, 64),
    (512, 8192, 16, 8, 128),
    (512, 32768, 16, 8, 64),
)
SELECTED = ((1, 4096), (1, 32768), (16, 4096), (16, 32768))  # tokens at the end of so many positions
INDEXER, LATENT, SELECTED_HEADS, TOP_K = (
    (32, 128),
    (576, 512),
    64,
    2048,
)  # GLM-5's; DeepSeek V3.2 has twice as many heads
BLOCK = 16
# Inputs and outputs of SmolLM2-135M, Qwen3-0.6B and Qwen3-4B: queries, keys and values; gate and up; down.
GROUPED_SHAPES = (
    ((576, 960), (576, 3072), (1536, 576)),
    ((1024, 4096), (1024, 6144), (3072, 1024)),
    ((2560, 6144), (2560, 19456), (9728, 2560)),
)
GROUPED_ROWS = (1, 16, 512)
INT8_RATE = 2  # operations of the instructions for int8, in those for bfloat16


def linear(size_in: int, size_out: int, rows: int, limits: Limits) -> dict[str, Any]:
    """Time torch's linear layer, and ours with all weight formats: µs, and the share of the tighter hardware limit."""
    count = max(2, WEIGHT_BYTES // (2 * size_in * size_out))
    weights = [torch.randn(size_out, size_in).bfloat16() for _ in range(count)]
    x = torch.randn(rows, size_in).bfloat16()
    runs = 3 * count if rows <= 64 else 12
    plain = [partial(torch.nn.functional.linear, x, weight) for weight in weights]
    result: dict[str, Any] = {"inputs": size_in, "outputs": size_out, "rows": rows, "torch": _microseconds(plain, runs)}
    for weight_format in FORMATS:
        packed = [pack_weight(weight, weight_format) for weight in weights]
        calls = [partial(weight, x, None) for weight in packed if weight is not None]
        result[weight_format] = _microseconds(calls, runs)
    floor = max(2 * size_in * size_out / limits.bandwidth, 2 * rows * size_in * size_out / limits.operations) * 1e6
    return {**result, "share_of_limit": round(floor / result["none"]["best"], 2)}


def grouped_products(size_in: int, size_out: int, rows: int, limits: Limits) -> dict[str, Any]:
    """Time linear layers whose weights are stored in groups, and panels of bfloat16.

    Each with µs, bits of a weight, and shares of the limits of memory (the packed bytes) and of integer arithmetic.
    """
    x, result = torch.randn(rows, size_in).bfloat16(), dict[str, Any]()
    operations = 2 * rows * size_in * size_out
    for name, packed in _grouped_weights(size_in, size_out).items():
        count = max(2, WEIGHT_BYTES // packed.nbytes if rows <= 64 else 2)
        times = _replayed([packed, *(copy.deepcopy(packed) for _ in range(count - 1))], x)
        rate = limits.operations if name == "bfloat16" else INT8_RATE * limits.operations
        result[name] = {
            **times,
            "bits": round(8 * packed.nbytes / (size_in * size_out), 2),
            "share_of_bandwidth": round(packed.nbytes / times["best"] * 1e6 / limits.bandwidth, 2),
            "share_of_operations": round(operations / times["best"] * 1e6 / rate, 2),
        }
    return {"inputs": size_in, "outputs": size_out, "rows": rows, **result}


def _grouped_weights(size_in: int, size_out: int) -> dict[str, PackedWeight]:
    """Packed weights of each format, with the layouts of those of real ones."""
    weight = torch.randn(size_out, size_in).bfloat16()
    packed: dict[str, PackedWeight | None] = {
        "bfloat16": pack_weight(weight, "none"),
        "int8": pack_weight(weight, "int8"),
        "int4": pack_weight(weight, "int4"),
    }
    table = torch.linspace(-1, 1, 16)
    stored = {
        "Q4_K": GroupedWeight(
            _nibbles(size_out, size_in),
            _two_levels(size_out, size_in, 32, 63),
            minimums=_two_levels(size_out, size_in, 32, 63),
        ),
        "Q6_K": GroupedWeight(
            torch.randint(-32, 32, (size_out, size_in), dtype=torch.int8), _two_levels(size_out, size_in, 16, 127)
        ),
        "nf4": GroupedWeight(_nibbles(size_out, size_in), torch.rand(size_out, size_in // 64), table=table),
    }
    packed |= {name: pack_groups([groups], torch.bfloat16, weight.device) for name, groups in stored.items()}
    return {name: kept for name, kept in packed.items() if kept is not None}


def _nibbles(size_out: int, size_in: int) -> torch.Tensor:
    return torch.randint(256, (size_out, size_in // 2), dtype=torch.uint8)


def _two_levels(size_out: int, size_in: int, group: int, largest: int) -> torch.Tensor:
    """Scales that are integers times a factor for each 256 inputs."""
    integers = torch.randint(largest, (size_out, size_in // group))
    integers[:, :: 256 // group] = largest
    return integers * torch.rand(size_out, 1).half().float()


def head_products(heads: int, size_in: int, size_out: int, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Time torch's product of each head with its own weight, and ours, which writes to a part of a tensor: µs."""
    count = max(2, WEIGHT_BYTES // (dtype.itemsize * heads * size_in * size_out))
    weights = [torch.randn(heads, size_out, size_in).to(dtype) for _ in range(count)]
    x = torch.randn(rows, heads, size_in + 64)[..., :size_in].to(dtype)
    out = torch.empty(rows, heads, size_out + 64, dtype=dtype)[..., :size_out]
    runs = 3 * count if rows <= 64 else 12
    plain = [partial(reference, x, weight) for weight in weights]
    calls_of_kernel = [partial(packed, x, out=out) for packed in map(pack_head_weight, weights) if packed is not None]
    case = {"heads": heads, "inputs": size_in, "outputs": size_out, "rows": rows, "dtype": str(dtype)}
    return {**case, "torch": _microseconds(plain, runs), "ours": _microseconds(calls_of_kernel, runs)}


def attention(sequences: int, positions: int, heads: int, kv_heads: int, dim: int, limits: Limits) -> dict[str, Any]:
    """Time decode attention of the compiled kernel and of the torch reference, cycling through several caches."""
    blocks = -(-positions // BLOCK)
    size = sequences * blocks * BLOCK * kv_heads * dim * 4
    shapes = [CacheShape(kv_heads, dim, dim)] * max(2, WEIGHT_BYTES // size)
    group = CacheGroup(FullCache(), tuple(range(len(shapes))))
    caches = HostKVCache(
        CacheLayout.of_one_group(shapes, group), sequences * blocks, BLOCK, torch.bfloat16
    ).layers.values()
    for cache in caches:
        cache.keys.normal_()
        cache.values.normal_()
    tables = torch.randperm(sequences * blocks).view(sequences, blocks).int()
    lengths, q = torch.full((sequences,), positions), torch.randn(sequences, heads, dim).bfloat16()
    params = AttentionParams(dim**-0.5)
    calls = [partial(paged_decode, q, cache.keys, cache.values, tables, lengths, params) for cache in caches]
    compiled = _microseconds(calls, 3 * len(calls))
    with native.disabled():
        reference = _microseconds(calls, 6)
    bandwidth = size / compiled["best"] * 1e6
    case = {"sequences": sequences, "positions": positions, "heads": heads, "kv_heads": kv_heads, "dim": dim}
    return {
        **case,
        "ours": compiled,
        "reference": reference,
        "share_of_bandwidth": round(bandwidth / limits.bandwidth, 2),
    }


def prefill_attention(
    tokens: int, positions: int, heads: int, kv_heads: int, dim: int, limits: Limits
) -> dict[str, Any]:
    """Time attention of the last tokens of a prompt: µs, and the share of the limit of arithmetic."""
    blocks = -(-positions // BLOCK)
    layout = CacheLayout.of_one_group([CacheShape(kv_heads, dim, dim)], CacheGroup(FullCache(), (0,)))
    (cache,) = HostKVCache(layout, blocks, BLOCK, torch.bfloat16).layers.values()
    cache.keys.normal_()
    cache.values.normal_()
    table, q = torch.randperm(blocks).view(1, blocks).int(), torch.randn(tokens, heads, dim).bfloat16()
    span = AttentionMetadata(table, torch.tensor([positions]), torch.tensor([0, 1, tokens]))
    call = partial(paged_varlen, q, cache.keys, cache.values, span, AttentionParams(dim**-0.5))
    times = _microseconds([call], 12)
    operations = 4 * tokens * (positions - tokens / 2) * heads * dim  # of scores and of values
    return {
        "tokens": tokens,
        "positions": positions,
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        **times,
        "share_of_operations": round(operations / times["best"] * 1e6 / limits.operations, 2),
    }


def selected_attention(tokens: int, positions: int, limits: Limits) -> dict[str, Any]:
    """Time the selection of tokens and the attention to them, of the last tokens of a prompt, and the same in torch."""
    (index_heads, index_dim), (key_dim, value_dim) = INDEXER, LATENT
    blocks = -(-positions // BLOCK)
    shape = CacheShape(1, key_dim + index_dim, value_dim, values_in_keys=True)
    layout = CacheLayout.of_one_group([shape], CacheGroup(FullCache(), (0,)))
    (cache,) = HostKVCache(layout, blocks, BLOCK, torch.bfloat16).layers.values()
    cache.keys.normal_()
    lengths = torch.arange(positions - tokens + 1, positions + 1)
    places = TokenPlaces(torch.randperm(blocks).view(1, blocks).int(), lengths, torch.zeros(tokens, dtype=torch.int64))
    queries = torch.randn(tokens, index_heads, index_dim).bfloat16()
    weights, q = torch.randn(tokens, index_heads), torch.randn(tokens, SELECTED_HEADS, key_dim + index_dim).bfloat16()
    q[..., key_dim:] = 0.0
    params = AttentionParams(key_dim**-0.5)
    select = partial(select_positions, queries, weights, cache.keys, places, key_dim, TOP_K, 1.0)
    attend = partial(attend_selected, q, cache.keys, cache.values, places, select(), key_dim, params)
    runs = 5 if tokens > 1 else 12
    times = {"select": _microseconds([select], runs), "attend": _microseconds([attend], runs)}
    with native.disabled():
        torch_times = {"select": _microseconds([select], runs), "attend": _microseconds([attend], runs)}
    operations = 2 * tokens * (positions * index_heads * index_dim + TOP_K * SELECTED_HEADS * (key_dim + value_dim))
    seconds = sum(part["best"] for part in times.values()) / 1e6
    return {
        "tokens": tokens,
        "positions": positions,
        **times,
        "torch": torch_times,
        "ratio": round(sum(part["best"] for part in torch_times.values()) / 1e6 / seconds, 2),
        "share_of_operations": round(operations / seconds / limits.operations, 2),
    }


def _replayed(weights: Sequence[PackedWeight], x: torch.Tensor) -> dict[str, float]:
    """Time products with weights that are captured together, as in decode steps: µs of one."""
    counts = [len(x)] * len(RowKind)

    def multiply() -> None:
        for weight in weights:
            weight(x, None)

    calls = CapturedCalls(multiply, Workspace(), counts)
    assert calls.complete
    low, median = timed(lambda: calls.replay(counts), 7)
    return {"best": round(low / len(weights) * 1e6, 1), "median": round(median / len(weights) * 1e6, 1)}


def _microseconds(calls: Sequence[Callable[[], object]], runs: int) -> dict[str, float]:
    turns = itertools.cycle(calls)
    low, median = timed(lambda: next(turns)(), runs)  # noqa: PLW0108 a different call each time
    return {"best": round(low * 1e6, 1), "median": round(median * 1e6, 1)}


PARTS: Mapping[str, Callable[[Limits], list[dict[str, Any]]]] = {
    "linear": lambda limits: [linear(*shape, rows, limits) for shape in SHAPES for rows in ROWS],
    "grouped": lambda limits: [
        grouped_products(*shape, rows, limits) for model in GROUPED_SHAPES for shape in model for rows in GROUPED_ROWS
    ],
    "heads": lambda _: [
        head_products(*shape, rows, dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for shape in HEADS
        for rows in ROWS
    ],
    "attention": lambda limits: [attention(*case, limits) for case in CASES],
    "prefill": lambda limits: [prefill_attention(*case, limits) for case in PREFILLS],
    "selected": lambda limits: [selected_attention(*case, limits) for case in SELECTED],
}


def main() -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    limits = Limits.measured()
    report = {
        "date": date.today().isoformat(),
        "threads": torch.get_num_threads(),
        "instructions": native.instructions(),
        "read_gb_per_s": round(limits.bandwidth / 1e9, 1),
        "tflop_per_s": round(limits.operations / 1e12, 3),
        **{name: PARTS[name](limits) for name in options.parts},
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
