"""Runs the benchmarks in miniature: no GPU, small sizes, Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.gpu import attention, engine, limits, matmul, models, small_ops
from quire.kernels import gpu
from tests.support import triton_interpreter
from tests.support.fake_cuda import fake_cuda
from tests.support.triton_device import InterpretedDevice

triton_interpreter.prepare()
SMALL: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
SMALL |= {"num_hidden_layers": 1, "intermediate_size": 48, "vocab_size": 1024}  # prompts have ids up to 1000
# Of models with states: two layers, of which one has attention.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "layer_types": ["linear_attention", "full_attention"],
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "granite-4-h-350m": {
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 48,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
}
HYBRIDS = {name: {**fields, "num_hidden_layers": 2} for name, fields in HYBRIDS.items()}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small sizes of everything, without a GPU."""
    if not gpu.is_interpreted():
        pytest.skip("there is a GPU, on which the benchmarks run themselves")
    for module in (attention, engine, matmul, small_ops):
        monkeypatch.setattr(module, "require_gpu", lambda _: None)
    monkeypatch.setattr(limits, "_BYTES", 1 << 16)
    monkeypatch.setattr(limits, "_SIZE", 32)
    monkeypatch.setattr(limits, "_REPEATS", 2)
    for name, shape in models.SHAPES.items():
        experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
        fields = {**(experts if "num_experts" in shape else {}), **HYBRIDS.get(name, {})}
        monkeypatch.setitem(models.SHAPES, name, {**shape, **SMALL, **fields})
    monkeypatch.setattr(models, "DEVICE", "cpu")
    monkeypatch.setattr("quire.engine.models.loader.checkpoint_in", models.RandomCheckpoint)  # is restored afterwards
    monkeypatch.setattr("quire.engine.build.engine.find_device", lambda _: InterpretedDevice())
    with fake_cuda(monkeypatch):
        yield
