"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.engine.models.config.rope import rope_of
from quire.engine.models.errors import UnsupportedOption
from quire.engine.models.families.llama import LLAMA, attention, decoder, head_dim, mlp, uniform
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    GatedExperts,
    GroupedQueryAttention,
    Layer,
    MoE,
    SoftmaxRouter,
)
from quire.engine.models.specs.tensor_names import LAYER

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_SELECTION_BIAS = (LAYER + r"mlp\.(?:gate\.)?moe_statics\.e_score_correction_bias", "ffn.score_bias")


def _flat(bias: Tensor) -> Tensor:
    return bias.flatten()


def _attention(config: Any) -> GroupedQueryAttention:
    bias = bool(config.use_bias)
    return attention(config, rope=rope_of(config, head_dim(config), interleaved=True), qkv_bias=bias, out_bias=bias)


def ernie4_5(config: Any) -> DecoderSpec:
    """ERNIE 4.5, dense: Llama with a rope of adjacent elements."""
    return uniform(config, _attention(config), mlp(config, bias=bool(config.use_bias)))


def ernie4_5_moe(config: Any) -> DecoderSpec:
    """ERNIE 4.5 with experts on some layers, which are selected with a bias.

    Raises:
        UnsupportedOption: projections have biases, which those of experts would have, too.
    """
    if config.use_bias:
        raise UnsupportedOption("use_bias is not supported for ERNIE 4.5 with experts")
    experts = MoE(
        size=config.moe_intermediate_size,
        experts=config.moe_num_experts,
        top_k=config.moe_k,
        router=SoftmaxRouter(selection_bias=True, least_sum=config.moe_norm_min),
        expert=GatedExperts(act=config.hidden_act),
        shared=config.moe_intermediate_size * config.moe_num_shared_experts,
    )
    first, last, interval = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
    ffns = [
        experts if (index + 1) % interval == 0 and first <= index <= last else mlp(config)
        for index in range(config.num_hidden_layers)
    ]
    return decoder(config, [Layer(attn=_attention(config), ffn=ffn) for ffn in ffns])


FAMILIES = (
    Family(name="ernie4_5", config_types=("ernie4_5",), spec=ernie4_5, tensors=LLAMA),
    Family(
        name="ernie4_5_moe",
        config_types=("ernie4_5_moe",),
        spec=ernie4_5_moe,
        tensors=replace(
            LLAMA,
            rules=(*LLAMA.rules, _SELECTION_BIAS),
            ignored=rf"{LLAMA.ignored}|mtp_.*",
            convert={"ffn.score_bias": _flat},
        ),
    ),
)
