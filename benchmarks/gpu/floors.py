"""The least time that steps of a model can take at the measured limits of a GPU."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from benchmarks.gpu.limits import GpuLimits
from benchmarks.gpu.models import SHAPES, has_states, tensor_shapes
from quire.engine.client.model_info import ModelInfo


class Floors(NamedTuple):
    """Seconds that one decode step takes at least.

    Attributes:
        weights: to read the weights that it needs.
        memory: to read these and the KV cache, and to read and write states.
        products: to multiply.
    """

    weights: float
    memory: float
    products: float

    @property
    def larger(self) -> float:
        """The larger one of memory and products."""
        return max(self.memory, self.products)


class States(NamedTuple):
    """The states of sequences.

    Attributes:
        slots: number of sequences that there is memory for.
        nbytes: bytes of the states of one.
    """

    slots: int
    nbytes: int


NO_STATES = States(0, 0)


def decode_floors(
    shape: str, info: ModelInfo, limits: GpuLimits, batch: int, context: int, states: States = NO_STATES
) -> Floors:
    """The floors of a step of `batch` sequences of `context` tokens, at the speed of a copy and of large products."""
    config = SHAPES[shape]
    embedding = 0 if config["tie_word_embeddings"] else config["vocab_size"] * config["hidden_size"] * 2
    weights = info.weight_bytes - embedding  # rows of which are read
    if experts := config.get("num_experts", 0):
        unused = (1 - config["num_experts_per_tok"] / experts) ** batch  # share of experts that no token chooses
        weights -= int(config["num_hidden_layers"] * experts * _expert_parameters(config) * 2 * unused)
    pages = info.cache_bytes - states.slots * states.nbytes
    cache = batch * context * pages / (info.num_blocks * info.block_size) + 2 * batch * states.nbytes
    copy, rate = limits.copy_bytes_per_s, limits.bf16_tflops * 1e12
    head = config["vocab_size"] * config["hidden_size"]
    operations = batch * (2 * (_layer_parameters(config) + head) + _attention(config, context) + _recurrence(config))
    return Floors(weights / copy, (weights + cache) / copy, operations / rate)


def prefill_floor(shape: str, limits: GpuLimits, tokens: int, context: int) -> float:
    """Seconds for the products of a prefill of `tokens` tokens, in prompts of `context`, at the rate of large ones.

    Logits are computed for the last token of a prompt only, and are left out.
    """
    config = SHAPES[shape]
    attention = _attention(config, context) / 2  # causal: half of all pairs
    operations = tokens * (2 * _layer_parameters(config) + attention + _recurrence(config))
    return float(operations / (limits.bf16_tflops * 1e12))


def _layer_parameters(config: dict[str, Any]) -> int:
    """Parameters of all layers that a token is multiplied with."""
    experts = config.get("num_experts", 0)
    used = config["num_experts_per_tok"] / experts if experts else 1
    sizes = (
        math.prod(size) * (used if ".experts." in name else 1)
        for name, size in tensor_shapes(config).items()
        if ".layers." in name and len(size) > 1
    )
    return int(sum(sizes))


def _expert_parameters(config: dict[str, Any]) -> int:
    return int(3 * config["hidden_size"] * config["moe_intermediate_size"])


def _attention(config: dict[str, Any], context: int) -> int:
    """Operations of a token's products with `context` keys and values, in all layers that have them."""
    heads = config["num_attention_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)
    layers = config["num_hidden_layers"] - _layers_with_states(config)
    return int(4 * layers * heads * dim * context)


def _recurrence(config: dict[str, Any]) -> int:
    """Operations of a token with the states of all layers: two for each product of an element, its sum included.

    Mamba-2 adds to the state and reads it; the gated delta rule reads it once more before that.
    """
    if "mamba_n_heads" in config:
        elements, products = config["mamba_n_heads"] * config["mamba_d_head"] * config["mamba_d_state"], 2
    elif "linear_num_value_heads" in config:
        heads = config["linear_num_value_heads"]
        elements, products = heads * config["linear_value_head_dim"] * config["linear_key_head_dim"], 3
    else:
        return 0
    return int(2 * products * _layers_with_states(config) * elements)


def _layers_with_states(config: dict[str, Any]) -> int:
    return sum(has_states(config, layer) for layer in range(config["num_hidden_layers"]))
