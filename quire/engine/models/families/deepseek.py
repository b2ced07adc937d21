"""DeepSeek V2, V3 and R1."""

from __future__ import annotations

from typing import Any

from quire.engine.models.config.rope import rope_of, yarn_scale
from quire.engine.models.errors import UnsupportedModel, UnsupportedOption
from quire.engine.models.families.llama import LLAMA, decoder, mlp
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    GatedExperts,
    GroupedSigmoidRouter,
    LatentAttention,
    Layer,
    MoE,
    SoftmaxRouter,
)


def grouped_experts(config: Any) -> MoE:
    """Experts in groups, and a shared one."""
    return _experts(config, grouped_router(config))


def grouped_router(config: Any) -> GroupedSigmoidRouter:
    """Return the router of experts in groups."""
    return GroupedSigmoidRouter(
        groups=config.n_group,
        top_groups=config.topk_group,
        renormalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )


def _experts(config: Any, router: GroupedSigmoidRouter | SoftmaxRouter) -> MoE:
    return MoE(
        size=config.moe_intermediate_size,
        experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        router=router,
        expert=GatedExperts(act=config.hidden_act),
        shared=config.moe_intermediate_size * (config.n_shared_experts or 0),
    )


def deepseek_v3(config: Any) -> DecoderSpec:
    """DeepSeek V3 and R1: latent attention, grouped sigmoid routing, dense first layers."""
    return _latent_decoder(config, grouped_experts(config), interleaved=bool(config.rope_interleave))


def deepseek_v2(config: Any) -> DecoderSpec:
    """DeepSeek V2, which routes by a softmax."""
    grouped = config.topk_method == "group_limited_greedy"
    if not grouped and config.topk_method != "greedy":
        raise UnsupportedModel(
            f"topk_method {config.topk_method!r} is not supported; supported are greedy and group_limited_greedy"
        )
    if config.mlp_bias:
        raise UnsupportedOption("mlp_bias is not supported for DeepSeek V2")
    router = SoftmaxRouter(
        renormalize=False,  # transformers does not read norm_topk_prob
        groups=config.n_group if grouped else 1,
        top_groups=config.topk_group if grouped else 1,
        scale=config.routed_scaling_factor,
    )
    return _latent_decoder(config, _experts(config, router), interleaved=True)


def _latent_decoder(config: Any, experts: MoE, *, interleaved: bool) -> DecoderSpec:
    params = config.rope_parameters
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if params["rope_type"] != "default" and params.get("mscale_all_dim"):
        scale *= yarn_scale(params["factor"], params["mscale_all_dim"]) ** 2
    attn = LatentAttention(
        heads=config.num_attention_heads,
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        shared_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        scale=scale,
        rope=rope_of(config, config.qk_rope_head_dim, interleaved=interleaved),
        bias=bool(config.attention_bias),
    )
    ffns = [
        mlp(config) if index < config.first_k_dense_replace else experts for index in range(config.num_hidden_layers)
    ]
    return decoder(config, [Layer(attn=attn, ffn=ffn) for ffn in ffns])


FAMILIES = (
    Family(name="deepseek_v2", config_types=("deepseek_v2",), spec=deepseek_v2, tensors=LLAMA),
    Family(name="deepseek_v3", config_types=("deepseek_v3",), spec=deepseek_v3, tensors=LLAMA),
)
