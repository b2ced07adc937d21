"""EXAONE 4, and K-EXAONE with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.families.llama import (
    LLAMA,
    LLAMA_OUTPUT_NORMS,
    attention,
    decoder,
    mlp,
    windowed,
)
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    GatedExperts,
    GroupedQueryAttention,
    GroupedSigmoidRouter,
    Layer,
    MoE,
    QKNorm,
)


def _attentions(config: Any) -> list[GroupedQueryAttention]:
    """The attention of each layer. Where some have sliding windows, the others have no rope."""
    attn = attention(config, qk_norm=QKNorm.HEAD)
    if config.sliding_window is None:
        return [attn] * config.num_hidden_layers
    return [each if each.window is not None else replace(each, rope=None) for each in windowed(config, attn)]


def exaone4(config: Any) -> DecoderSpec:
    """EXAONE 4: norms after the branches only."""
    layers = [
        Layer(attn=attn, ffn=mlp(config), pre_norm=False, branch_output_norm=True) for attn in _attentions(config)
    ]
    return decoder(config, layers)


def exaone_moe(config: Any) -> DecoderSpec:
    """K-EXAONE: norms before the branches, DeepSeek's experts on some layers."""
    experts = MoE(
        size=config.moe_intermediate_size,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        router=GroupedSigmoidRouter(
            groups=config.n_group,
            top_groups=config.topk_group,
            renormalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        ),
        expert=GatedExperts(act=config.hidden_act),
        shared=config.moe_intermediate_size * config.num_shared_experts,
    )
    layers = [
        Layer(attn=attn, ffn=experts if kind == "sparse" else mlp(config))
        for attn, kind in zip(_attentions(config), config.mlp_layer_types, strict=True)
    ]
    return decoder(config, layers)


FAMILIES = (
    Family(name="exaone4", config_types=("exaone4",), spec=exaone4, tensors=LLAMA_OUTPUT_NORMS),
    Family(
        name="exaone_moe",
        config_types=("exaone_moe",),
        spec=exaone_moe,
        tensors=replace(LLAMA, ignored=rf"{LLAMA.ignored}|mtp\..*"),
    ),
)
