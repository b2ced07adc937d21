"""The least time that steps of a model can take at the measured limits of a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.gpu.limits import GpuLimits
from benchmarks.gpu.models import SHAPES
from quire.engine.client.model_info import ModelInfo


class Floors(NamedTuple):
    """Seconds that one decode step takes at least.

    Attributes:
        weights: to read the weights that it needs.
        memory: to read these and the KV cache.
        products: to multiply.
    """

    weights: float
    memory: float
    products: float

    @property
    def larger(self) -> float:
        """The larger one of memory and products."""
        return max(self.memory, self.products)


def decode_floors(shape: str, info: ModelInfo, limits: GpuLimits, batch: int, context: int) -> Floors:
    """The floors of a step of `batch` sequences of `context` tokens, at the speed of a copy and of large products."""
    config = SHAPES[shape]
    embedding = 0 if config["tie_word_embeddings"] else config["vocab_size"] * config["hidden_size"] * 2
    weights = info.weight_bytes - embedding  # rows of which are read
    if experts := config.get("num_experts", 0):
        unused = (1 - config["num_experts_per_tok"] / experts) ** batch  # share of experts that no token chooses
        weights -= int(config["num_hidden_layers"] * experts * _expert_parameters(config) * 2 * unused)
    cache = batch * context * info.cache_bytes / (info.num_blocks * info.block_size)
    copy, rate = limits.copy_bytes_per_s, limits.bf16_tflops * 1e12
    head = config["vocab_size"] * config["hidden_size"]
    operations = batch * 2 * (_layer_parameters(config) + head) + batch * _attention(config, context)
    return Floors(weights / copy, (weights + cache) / copy, operations / rate)


def prefill_floor(shape: str, limits: GpuLimits, tokens: int, context: int) -> float:
    """Seconds for the products of a prefill of `tokens` tokens, in prompts of `context`, at the rate of large ones.

    Logits are computed for the last token of a prompt only, and are left out.
    """
    config = SHAPES[shape]
    operations = tokens * (2 * _layer_parameters(config) + _attention(config, context) / 2)  # causal: half of all pairs
    return float(operations / (limits.bf16_tflops * 1e12))


def _layer_parameters(config: dict[str, Any]) -> int:
    """Parameters of all layers that a token is multiplied with."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", hidden // heads)
    attention = 2 * hidden * (heads + kv_heads) * dim
    if experts := config.get("num_experts", 0):
        ffn = experts * hidden + config["num_experts_per_tok"] * _expert_parameters(config)
    else:
        ffn = 3 * hidden * config["intermediate_size"]
    return int(config["num_hidden_layers"] * (attention + ffn))


def _expert_parameters(config: dict[str, Any]) -> int:
    return int(3 * config["hidden_size"] * config["moe_intermediate_size"])


def _attention(config: dict[str, Any], context: int) -> int:
    """Operations of a token's products with `context` keys and values, in all layers."""
    heads = config["num_attention_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)
    return int(4 * config["num_hidden_layers"] * heads * dim * context)
