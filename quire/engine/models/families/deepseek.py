"""DeepSeek V2, V3, R1 and V3.2, GLM-4.7-Flash and GLM-5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine.models.config.rope import rope_of, yarn_scale
from quire.engine.models.errors import UnsupportedModel, UnsupportedOption
from quire.engine.models.families.llama import LLAMA, decoder, mlp
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    FeedForward,
    GatedExperts,
    GroupedSigmoidRouter,
    Indexer,
    LatentAttention,
    Layer,
    MoE,
    SoftmaxRouter,
)
from quire.engine.models.specs.tensor_names import KIND, LAYER, WeightNames


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


def glm4_moe_lite(config: Any) -> DecoderSpec:
    """GLM-4.7-Flash: DeepSeek V3 whose config says which layers are dense."""
    attn = _latent_attention(config, interleaved=bool(config.rope_interleave))
    return decoder(config, [Layer(attn=attn, ffn=ffn) for ffn in _listed_feed_forwards(config)])


def _listed_feed_forwards(config: Any) -> list[FeedForward]:
    """The feed-forwards of all layers, by `mlp_layer_types`.

    Raises:
        UnsupportedModel: there are other types than dense and sparse, or too few or too many.
    """
    kinds = config.mlp_layer_types
    if set(kinds) - {"dense", "sparse"} or len(kinds) != config.num_hidden_layers:
        raise UnsupportedModel(f"mlp_layer_types must name {config.num_hidden_layers} layers, each dense or sparse")
    experts, dense = grouped_experts(config), mlp(config)
    return [experts if kind == "sparse" else dense for kind in kinds]


def deepseek_v32(config: Any) -> DecoderSpec:
    """DeepSeek V3.2: V3 with an indexer in each layer, whose rope does not rotate adjacent elements."""
    return _indexed(config, [False] * config.num_hidden_layers, interleaved=False)


def glm_moe_dsa(config: Any) -> DecoderSpec:
    """GLM-5: DeepSeek V3.2 with indexers in some layers, whose selection the following ones share."""
    kinds = config.indexer_types[: config.num_hidden_layers]
    for kind in sorted(set(kinds) - {"full", "shared"}):
        raise UnsupportedModel(f"indexer_types has {kind!r}, which is not supported; supported are full and shared")
    return _indexed(config, [kind == "shared" for kind in kinds], interleaved=True)


def _indexed(config: Any, shared: Sequence[bool], *, interleaved: bool) -> DecoderSpec:
    """A decoder whose layers attend to selected tokens.

    `shared`: of each layer whether it has no indexer of its own; `interleaved`: the indexers' ropes are.
    """
    for kind in sorted(set(config.layer_types) - {"indexed_attention"}):
        raise UnsupportedModel(f"layers of type {kind!r} are not supported; supported is indexed_attention")
    indexer = Indexer(
        heads=config.index_n_heads,
        dim=config.index_head_dim,
        top_k=config.index_topk,
        rope=rope_of(config, config.qk_rope_head_dim, interleaved=interleaved),
    )
    attn = _latent_attention(config, interleaved=True)
    layers = [
        Layer(attn=replace(attn, indexer=replace(indexer, is_shared=is_shared)), ffn=ffn)
        for is_shared, ffn in zip(shared, _listed_feed_forwards(config), strict=True)
    ]
    return decoder(config, layers)


def _latent_decoder(config: Any, experts: MoE, *, interleaved: bool) -> DecoderSpec:
    attn = _latent_attention(config, interleaved=interleaved)
    ffns = [
        mlp(config) if index < config.first_k_dense_replace else experts for index in range(config.num_hidden_layers)
    ]
    return decoder(config, [Layer(attn=attn, ffn=ffn) for ffn in ffns])


def _latent_attention(config: Any, *, interleaved: bool) -> LatentAttention:
    params = config.rope_parameters
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if params["rope_type"] != "default" and params.get("mscale_all_dim"):
        scale *= yarn_scale(params["factor"], params["mscale_all_dim"]) ** 2
    return LatentAttention(
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


_INDEXER = LAYER + r"self_attn\.indexer\."
_INDEXER_RULES = (
    (_INDEXER + r"wq_b\.weight", "attn.indexer.q_b.weight"),
    (_INDEXER + r"wk\.weight", "attn.indexer.k.weight"),
    (_INDEXER + r"k_norm" + KIND, "attn.indexer.k_norm.{kind}"),
    (_INDEXER + r"weights_proj\.weight", "attn.indexer.weights.weight"),
)
_INDEXED = WeightNames((*LLAMA.rules, *_INDEXER_RULES), ignored=LLAMA.ignored)

FAMILIES = (
    Family(name="deepseek_v2", config_types=("deepseek_v2",), spec=deepseek_v2, tensors=LLAMA),
    Family(name="deepseek_v3", config_types=("deepseek_v3",), spec=deepseek_v3, tensors=LLAMA),
    Family(name="deepseek_v32", config_types=("deepseek_v32",), spec=deepseek_v32, tensors=_INDEXED),
    Family(name="glm4_moe_lite", config_types=("glm4_moe_lite",), spec=glm4_moe_lite, tensors=LLAMA),
    Family(name="glm_moe_dsa", config_types=("glm_moe_dsa",), spec=glm_moe_dsa, tensors=_INDEXED),
)
