"""Nemotron-H and Nemotron 3: layers that are a state space, attention, a feed-forward or experts alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.errors import UnsupportedModel, UnsupportedOption
from quire.engine.models.families.deepseek import grouped_router
from quire.engine.models.families.llama import attention
from quire.engine.models.families.mamba import MIXER_CONVERT, MIXER_NAMES, check_activation, step_limits
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    Layer,
    MoE,
    NoAttention,
    PlainExperts,
    PlainMLP,
    RMSNormSpec,
)
from quire.engine.models.specs.stacked_experts import unstacked
from quire.engine.models.specs.state_space import GatedNorm, HeadStateSpace
from quire.engine.models.specs.tensor_names import KIND, LAYER

_MIXER = LAYER + r"mixer\."
_RULES = (
    (LAYER + r"norm\.weight", "ffn_norm.weight"),
    (_MIXER + r"(?P<part>q|k|v)_proj" + KIND, "attn.qkv.{kind}"),
    (_MIXER + r"o_proj" + KIND, "attn.out.{kind}"),
    (_MIXER + r"up_proj" + KIND, "ffn.up.{kind}"),
    (_MIXER + r"down_proj" + KIND, "ffn.down.{kind}"),
    (_MIXER + r"gate\.weight", "ffn.router.weight"),
    (_MIXER + r"gate\.e_score_correction_bias", "ffn.score_bias"),
    (_MIXER + r"experts\.(?P<expert>\d+)\.up_proj\.weight", "ffn.experts.{expert}.gate_up.weight"),
    (_MIXER + r"experts\.(?P<expert>\d+)\.down_proj\.weight", "ffn.experts.{expert}.down.weight"),
    (_MIXER + r"shared_experts\.(?P<side>up|down)_proj\.weight", "ffn.shared.{side}.weight"),
)
_NAMES = replace(
    MIXER_NAMES,
    rules=(*MIXER_NAMES.rules, *_RULES),
    ignored=r"mtp\..*",
    convert=MIXER_CONVERT,
    prepare=unstacked("mixer", gated=False),
)


def nemotron_h(config: Any) -> DecoderSpec:
    """Nemotron-H and Nemotron 3.

    Raises:
        UnsupportedModel: there are layers of another kind, or experts that are not supported.
    """
    made = {
        "linear_attention": lambda: Layer(attn=_state_space(config), ffn=None),
        "full_attention": lambda: Layer(attn=attention(config, rope=None), ffn=None),
        "mlp": lambda: Layer(
            attn=NoAttention(),
            ffn=PlainMLP(size=config.intermediate_size, act=config.mlp_hidden_act, bias=bool(config.mlp_bias)),
        ),
        "moe": lambda: Layer(attn=NoAttention(), ffn=_experts(config)),
    }
    names = list(config.layer_types)
    if not names or not set(names) <= set(made):
        raise UnsupportedModel(f"layers_block_type must name layers; accepted are {', '.join(made)}")
    layers = {name: made[name]() for name in dict.fromkeys(names)}
    return DecoderSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=tuple(layers[name] for name in names),
        norm=RMSNormSpec(eps=config.layer_norm_epsilon),
        max_positions=config.max_position_embeddings,
        tied=bool(config.tie_word_embeddings),
    )


def _state_space(config: Any) -> HeadStateSpace:
    check_activation(config, "mamba_hidden_act")
    bias = bool(config.use_bias)
    return HeadStateSpace(
        heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        state=config.ssm_state_size,
        groups=config.n_groups,
        width=config.conv_kernel,
        bias=bias,
        out_bias=bias,
        conv_bias=bool(config.use_conv_bias),
        norm=GatedNorm(eps=config.layer_norm_epsilon),
        # transformers limits steps by time_step_min as well, but those of prompts only; the models learned without that
        **step_limits(config.time_step_limit),
    )


def _experts(config: Any) -> MoE:
    if config.moe_latent_size is not None:
        raise UnsupportedOption("moe_latent_size is not supported for models of type 'nemotron_h'")
    if config.mlp_bias:
        raise UnsupportedOption("mlp_bias is not supported for models of type 'nemotron_h' with experts")
    return MoE(
        size=config.moe_intermediate_size,
        experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        router=grouped_router(config),
        expert=PlainExperts(act=config.mlp_hidden_act),
        shared=config.moe_shared_expert_intermediate_size,
    )


FAMILIES = (Family(name="nemotron_h", config_types=("nemotron_h",), spec=nemotron_h, tensors=_NAMES),)
