"""Hunyuan, dense and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.config.rope import rope_of, rope_parameters, stretched_rope
from quire.engine.models.families.llama import LLAMA, biased_attention, decoder, head_dim, uniform
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    GatedExperts,
    GroupedQueryAttention,
    Layer,
    MoE,
    QKNorm,
    SoftmaxRouter,
)
from quire.engine.models.specs.rope import Rope
from quire.engine.models.specs.tensor_names import LAYER

_RULES = (
    (LAYER + r"self_attn\.query_layernorm\.weight", "attn.q_norm.weight"),
    (LAYER + r"self_attn\.key_layernorm\.weight", "attn.k_norm.weight"),
    (LAYER + r"mlp\.gate\.wg\.weight", "ffn.router.weight"),
    (LAYER + r"mlp\.shared_mlp\.(?P<part>gate|up)_proj\.weight", "ffn.shared.gate_up.weight"),
    (LAYER + r"mlp\.shared_mlp\.down_proj\.weight", "ffn.shared.down.weight"),
)
_NAMES = replace(LLAMA, rules=(*LLAMA.rules, *_RULES))


def _rope(config: Any) -> Rope:
    """The rope, whose type "dynamic" with an alpha is a base that is larger at all positions."""
    dim, params = head_dim(config), rope_parameters(config)
    if params.get("rope_type") == "dynamic" and params.get("alpha"):
        return stretched_rope(params["rope_theta"], params["alpha"], dim)
    return rope_of(config, dim)


def _attention(config: Any) -> GroupedQueryAttention:
    return biased_attention(config, qk_norm=QKNorm.HEAD, norms_rotated=True, rope=_rope(config))


def hunyuan_v1_dense(config: Any) -> DecoderSpec:
    """Hunyuan, dense: norms of heads behind the rope."""
    return uniform(config, _attention(config))


def hunyuan_v1_moe(config: Any) -> DecoderSpec:
    """Hunyuan with experts on each layer, and a shared one of the same size."""
    counts = config.moe_topk if isinstance(config.moe_topk, list) else [config.moe_topk] * config.num_hidden_layers
    layers = [
        Layer(
            attn=_attention(config),
            ffn=MoE(
                size=config.intermediate_size,
                experts=config.num_experts,
                top_k=top_k,
                router=SoftmaxRouter(),
                expert=GatedExperts(act=config.hidden_act),
                shared=config.intermediate_size,
            ),
        )
        for top_k in counts[: config.num_hidden_layers]
    ]
    return decoder(config, layers)


FAMILIES = (
    Family(name="hunyuan_v1_dense", config_types=("hunyuan_v1_dense",), spec=hunyuan_v1_dense, tensors=_NAMES),
    Family(name="hunyuan_v1_moe", config_types=("hunyuan_v1_moe",), spec=hunyuan_v1_moe, tensors=_NAMES),
)
