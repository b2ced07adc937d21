"""Bandwidth of the small Triton kernels and of those that sample, as a share of that of a copy in the same run.

Each op is replayed as a CUDA graph, on tensors larger than the GPU's cache. Its bytes are those that it has to read and
write at least once. Needs a CUDA device.

    python -m benchmarks.gpu.small_ops --out FILE.json
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.limits import GpuLimits, require_gpu, seconds
from benchmarks.gpu.report import Report
from quire.engine.execution.cache import DeviceKVCache
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.models.specs.cache import CacheGroup, CacheShape, FullCache
from quire.kernels.activation import act_and_mul, clamped_swiglu
from quire.kernels.add_rms_norm import add_rms_norm
from quire.kernels.adjust_logits import Penalties, TokenCounts, penalize
from quire.kernels.choose_tokens import argmax, choose_tokens
from quire.kernels.layer_norm import layer_norm
from quire.kernels.projected_heads import CosSin, ProjectedHeads, QKNormWeights
from quire.kernels.qk_norm_rope import qk_norm_rope
from quire.kernels.qk_norm_rope_write import in_two_ops, qk_norm_rope_write
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rope import apply_rope
from quire.kernels.sampling import ChoiceSettings
from quire.kernels.softcap import softcap_in_place
from quire.kernels.token_logprobs import token_logprobs

TOKENS, HIDDEN, INNER = 16384, 4096, 12288
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
BLOCK_SIZE = 16
ROWS, VOCAB = 256, 151_936


@dataclass(frozen=True, slots=True)
class Case:
    """An op with its bytes."""

    name: str
    nbytes: int
    run: Callable[[], object]


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def layer_cases() -> Iterator[Case]:
    """Ops over the hidden states of a prefill in bfloat16."""
    x, y, weight = _normal(TOKENS, HIDDEN), _normal(TOKENS, HIDDEN), _normal(HIDDEN)
    yield Case("rms_norm", 2 * x.nbytes, lambda: rms_norm(x, weight, 1e-6))
    yield Case("add_rms_norm", 4 * x.nbytes, lambda: add_rms_norm(x, y, 1.0, weight, 1e-6))
    yield Case("layer_norm with residual", 3 * x.nbytes, lambda: layer_norm(x, weight, weight, 1e-5, y))
    both = _normal(TOKENS, 2 * INNER)
    yield Case("act_and_mul silu", both.nbytes * 3 // 2, lambda: act_and_mul(both, "silu"))
    yield Case("act_and_mul gelu_pytorch_tanh", both.nbytes * 3 // 2, lambda: act_and_mul(both, "gelu_pytorch_tanh"))
    yield Case("clamped_swiglu", both.nbytes * 3 // 2, lambda: clamped_swiglu(both, 1.702, 7.0))


def head_cases() -> Iterator[Case]:
    """Norms and rotations of heads in bfloat16, and the same with the write of keys and values."""
    angle = torch.randn(TOKENS, HEAD_DIM // 2, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    x = _normal(TOKENS, HEADS, HEAD_DIM)
    tables = cos.nbytes + sin.nbytes
    for interleaved in (False, True):
        name = "apply_rope interleaved" if interleaved else "apply_rope"
        yield Case(name, 2 * x.nbytes + tables, partial(apply_rope, x, cos, sin, interleaved=interleaved))
    qkv = _normal(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    norms, angles = QKNormWeights(_normal(HEAD_DIM), _normal(HEAD_DIM), 1e-6, 0.0), CosSin(cos, sin, False)
    changed = qkv.nbytes * (HEADS + KV_HEADS) // (HEADS + 2 * KV_HEADS)
    heads = ProjectedHeads(qkv, HEADS, KV_HEADS, norms, angles)
    yield Case("qk_norm_rope", 2 * changed + tables, lambda: qk_norm_rope(heads))
    shape = CacheShape(KV_HEADS, HEAD_DIM, HEAD_DIM, row_alignment=16)
    slots, blocks = torch.randperm(TOKENS, device="cuda"), -(-TOKENS // BLOCK_SIZE)
    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        layout = CacheLayout.of_one_group([shape], CacheGroup(FullCache(), (0,)))
        layer = DeviceKVCache(layout, blocks, BLOCK_SIZE, dtype, qkv.device).layers[0]
        pages = layout.block_bytes(BLOCK_SIZE, dtype) * blocks
        nbytes = qkv.nbytes + x.nbytes + pages + tables + slots.nbytes
        name = f"qk_norm_rope_write {dtype}".replace("torch.", "")
        arguments = (heads, layer.keys, layer.values, slots, 1.0, 1.0)
        yield Case(name, nbytes, partial(qk_norm_rope_write, *arguments))
        yield Case(f"{name} in two ops", nbytes, partial(in_two_ops, *arguments))


def _settings(**fields: float) -> ChoiceSettings:
    def rows(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((ROWS,), value, dtype=dtype, device="cuda")

    top_k, top_p, min_p = int(fields.get("top_k", 0)), fields.get("top_p", 1.0), fields.get("min_p", 0.0)
    ranked = top_k > 0 or top_p < 1
    return ChoiceSettings(
        temperatures=rows(fields["temperature"]),
        randoms=torch.rand(ROWS, dtype=torch.float64, device="cuda"),
        log_min_p=rows(math.log(min_p) if min_p else -math.inf),
        top_k=rows(top_k, torch.int32),
        top_p=rows(top_p),
        random=not ranked,
        ranked=ranked,
    )


def logits_cases() -> Iterator[Case]:
    """Ops over the logits of a decode step, as peaked as a trained model's."""
    logits = torch.randn(ROWS, VOCAB, device="cuda")
    logits[:, :200] += 16 * torch.rand(ROWS, 200, device="cuda")
    yield Case("softcap", 2 * logits.nbytes, lambda: softcap_in_place(logits, 30.0))
    yield Case("argmax", logits.nbytes, lambda: argmax(logits))
    kinds: dict[str, dict[str, float]] = {
        "sample": {},
        "sample min-p 0.05": {"min_p": 0.05},
        "sample top-k 50": {"top_k": 50},
        "sample top-p 0.95": {"top_p": 0.95},
        "sample top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    }
    for name, fields in kinds.items():
        settings = _settings(temperature=1.0, **fields)
        yield Case(name, logits.nbytes, partial(choose_tokens, logits, settings))
    tokens = argmax(logits)
    yield Case("logprobs", logits.nbytes, lambda: token_logprobs(logits, tokens, 0))
    yield Case("logprobs of 20 top tokens", logits.nbytes, lambda: token_logprobs(logits, tokens, 20))
    rows = torch.arange(ROWS, device="cuda")
    counts = torch.zeros(ROWS, VOCAB, dtype=torch.int32, device="cuda")
    penalties = Penalties(*(torch.full((ROWS,), value, device="cuda") for value in (1.0, 0.0, 0.0)))
    seen, zeros = TokenCounts(rows.int(), counts), torch.zeros_like(rows)
    depths = zeros.int()
    nbytes = 2 * logits.nbytes + counts.nbytes
    yield Case("penalize", nbytes, lambda: penalize(logits, rows, depths, zeros, seen, penalties))


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """A CUDA graph of a call, which the call's Python does not delay."""
    call()  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], None] = graph.replay
    return replay


def measure(limits: GpuLimits, case: Case) -> dict[str, float]:
    """Microseconds of an op, and its share of the bandwidth of a copy."""
    taken = seconds(captured(case.run))
    return {
        "microseconds": round(taken * 1e6, 1),
        "gb_per_s": round(case.nbytes / taken / 1e9, 1),
        "share_of_copy": round(case.nbytes / taken / limits.copy_bytes_per_s, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all ops and write a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    require_gpu("benchmarks.gpu.small_ops")
    report = Report(options.out, tokens=TOKENS, rows=ROWS, vocabulary=VOCAB)
    for cases in (layer_cases, head_cases, logits_cases):
        for case in cases():
            report.add({"op": case.name}, partial(measure, report.limits, case))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
