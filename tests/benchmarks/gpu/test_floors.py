"""The least time of steps, from the tensors that a step reads."""

from __future__ import annotations

import math

import pytest
import torch
from msgspec import structs
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.floors import States, decode_floors, prefill_floor
from benchmarks.gpu.limits import GpuLimits
from benchmarks.gpu.models import SHAPES, tensor_shapes
from quire.engine.client.model_info import ModelInfo

LIMITS = GpuLimits("no GPU", copy_gb_per_s=3000.0, bf16_tflops=800.0, fp32_tflops=50.0)


def parameters(shape: str, part: str) -> int:
    """Those of a shape's tensors whose names have a part."""
    return sum(math.prod(size) for name, size in tensor_shapes(SHAPES[shape]).items() if part in name and len(size) > 1)


def info_of(shape: str, tokens: int) -> ModelInfo:
    """A model with a KV cache of 1,000 bytes for each of `tokens` tokens."""
    nbytes = 2 * parameters(shape, "")
    return ModelInfo("", "quire", "cuda", "bfloat16", 0, 0, tokens // 16, 16, nbytes, 1000 * tokens)


@pytest.mark.parametrize("shape", ["llama-3-8b", "qwen3-0.6b"])
def test_a_dense_model(shape: str) -> None:
    layers, head = parameters(shape, "layers"), parameters(shape, "embed_tokens")
    floors = decode_floors(shape, info_of(shape, 16_000), LIMITS, 1, 0)
    assert floors.weights == floors.memory == pytest.approx(2 * (layers + head) / 3e12)
    assert floors.products == pytest.approx(2 * (layers + head) / 8e14)
    cached = decode_floors(shape, info_of(shape, 16_000), LIMITS, 64, 2000)
    assert cached.memory - cached.weights == pytest.approx(64 * 2000 * 1000 / 3e12)
    config = SHAPES[shape]
    pairs = 4 * config["num_hidden_layers"] * config["num_attention_heads"] * 128 * 2000
    assert cached.products == pytest.approx(64 * (2 * (layers + head) + pairs) / 8e14)
    assert cached.larger == cached.memory
    assert prefill_floor(shape, LIMITS, 100, 2000) == pytest.approx(100 * (2 * layers + pairs / 2) / 8e14)


def test_a_mixture_of_experts() -> None:
    """One token reads eight experts of 128, many tokens read all."""
    shape = "qwen3-30b-a3b"
    experts, dense = parameters(shape, "mlp.experts"), parameters(shape, "") - parameters(shape, "mlp.experts")
    dense -= parameters(shape, "embed_tokens")
    single, many = (decode_floors(shape, info_of(shape, 160), LIMITS, batch, 0) for batch in (1, 10_000))
    assert single.weights == pytest.approx(2 * (dense + experts / 16) / 3e12)
    assert many.weights == pytest.approx(2 * (dense + experts) / 3e12)
    assert many.larger == many.products == pytest.approx(10_000 * 2 * (dense + experts / 16) / 8e14)


HYBRIDS = {"qwen3.5-0.8b": (6, 18, 16 * 128 * 128, 3), "granite-4-h-350m": (4, 28, 48 * 32 * 128, 2)}


@pytest.mark.parametrize("shape", HYBRIDS)
def test_a_model_with_states(shape: str) -> None:
    """A step reads and writes those of each sequence, however long it is; a few layers have keys and values."""
    attention, recurrent, elements, products = HYBRIDS[shape]
    config, states = SHAPES[shape], States(slots=100, nbytes=1_000_000)
    info = info_of(shape, 16_000)
    info = structs.replace(info, cache_bytes=info.cache_bytes + states.slots * states.nbytes)
    floors = decode_floors(shape, info, LIMITS, 64, 2000, states)
    assert floors.memory - floors.weights == pytest.approx((64 * 2000 * 1000 + 2 * 64 * 1_000_000) / 3e12)
    layers, head = parameters(shape, "layers"), parameters(shape, "embed_tokens")
    dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    pairs = 4 * attention * config["num_attention_heads"] * dim * 2000
    scan = 2 * products * recurrent * elements
    assert floors.products == pytest.approx(64 * (2 * (layers + head) + pairs + scan) / 8e14)
    assert prefill_floor(shape, LIMITS, 100, 2000) == pytest.approx(100 * (2 * layers + pairs / 2 + scan) / 8e14)


@pytest.mark.parametrize("shape", [*HYBRIDS, "qwen3-0.6b"])
def test_tensors_are_those_of_transformers(shape: str) -> None:
    fields = {name: value for name, value in SHAPES[shape].items() if name not in ("model_type", "architectures")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(SHAPES[shape]["model_type"], **fields))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    expected.pop("lm_head.weight")  # is the embedding
    assert tensor_shapes(SHAPES[shape]) == expected
