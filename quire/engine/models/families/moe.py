"""Decoders with mixture-of-experts layers."""

from __future__ import annotations

from typing import Any

from quire.engine.models.families.llama import attention, biased_attention, decoder, mlp, uniform, windowed
from quire.engine.models.families.rope import rope_of, yarn_scale
from quire.engine.models.specs.decoder import (
    ClampedSwigluExperts,
    DecoderSpec,
    GatedExperts,
    GroupedSigmoidRouter,
    LatentAttention,
    Layer,
    MoE,
    QKNorm,
    SoftmaxRouter,
)


def mixtral(config: Any) -> DecoderSpec:
    """Mixtral: Mistral with experts."""
    experts = MoE(
        size=config.intermediate_size,
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        router=SoftmaxRouter(),
        expert=GatedExperts(act=config.hidden_act),
    )
    return uniform(config, attention(config, window=config.sliding_window), experts)


def qwen3_moe(config: Any) -> DecoderSpec:
    """Qwen 3 with experts, on every `decoder_sparse_step`-th layer that is not listed as dense."""
    experts = MoE(
        size=config.moe_intermediate_size,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        router=SoftmaxRouter(renormalize=config.norm_topk_prob),
        expert=GatedExperts(act=config.hidden_act),
    )
    window = config.sliding_window if config.use_sliding_window else None
    attn = biased_attention(config, qk_norm=QKNorm.HEAD, window=window)
    dense = set(config.mlp_only_layers or ()) if config.num_experts else set(range(config.num_hidden_layers))
    sparse = [i not in dense and (i + 1) % config.decoder_sparse_step == 0 for i in range(config.num_hidden_layers)]
    return decoder(config, [Layer(attn=attn, ffn=experts if is_sparse else mlp(config)) for is_sparse in sparse])


def gpt_oss(config: Any) -> DecoderSpec:
    """gpt-oss: attention sinks, alternating sliding windows, clamped experts with biases."""
    experts = MoE(
        size=config.intermediate_size,
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        router=SoftmaxRouter(bias=True),  # softmax over the selected logits, which is equal to renormalizing
        expert=ClampedSwigluExperts(
            alpha=getattr(config, "swiglu_alpha", 1.702), limit=getattr(config, "swiglu_limit", 7.0)
        ),
    )
    attns = windowed(config, biased_attention(config, sinks=True))
    return decoder(config, [Layer(attn=attn, ffn=experts) for attn in attns])


def deepseek_v3(config: Any) -> DecoderSpec:
    """DeepSeek V3 and R1: latent attention, grouped sigmoid routing, dense first layers."""
    params = config.rope_parameters
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if params["rope_type"] != "default" and params.get("mscale_all_dim"):
        scale *= yarn_scale(params["factor"], params["mscale_all_dim"]) ** 2
    attn = LatentAttention(
        heads=config.num_attention_heads,
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        value_dim=config.v_head_dim,
        scale=scale,
        rope=rope_of(config, config.qk_rope_head_dim, interleaved=bool(config.rope_interleave)),
        bias=bool(config.attention_bias),
    )
    experts = MoE(
        size=config.moe_intermediate_size,
        experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        router=GroupedSigmoidRouter(
            groups=config.n_group,
            top_groups=config.topk_group,
            renormalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        ),
        expert=GatedExperts(act=config.hidden_act),
        shared=config.moe_intermediate_size * config.n_shared_experts,
    )
    ffns = [
        mlp(config) if index < config.first_k_dense_replace else experts for index in range(config.num_hidden_layers)
    ]
    return decoder(config, [Layer(attn=attn, ffn=ffn) for ffn in ffns])
