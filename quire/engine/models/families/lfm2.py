"""LFM2: short convolutions, and attention in some layers; with experts as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine.models.config.rope import max_positions
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.llama import LLAMA, attention
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    FeedForward,
    GatedExperts,
    GatedMLP,
    GroupedSigmoidRouter,
    Layer,
    MoE,
    QKNorm,
    RMSNormSpec,
)
from quire.engine.models.specs.stacked_experts import unstacked
from quire.engine.models.specs.state_space import ShortConvolution
from quire.engine.models.specs.tensor_names import KIND, LAYER, taps_first

_FFN = LAYER + r"feed_forward\."
_RULES = (
    (LAYER + r"conv\.in_proj" + KIND, "attn.inputs.{kind}"),
    (LAYER + r"conv\.conv" + KIND, "attn.conv.{kind}"),
    (LAYER + r"(?:conv|self_attn)\.out_proj" + KIND, "attn.out.{kind}"),
    (LAYER + r"self_attn\.(?P<side>q|k)_layernorm\.weight", "attn.{side}_norm.weight"),
    (_FFN + r"(?P<part>w1|w3)\.weight", "ffn.gate_up.weight"),
    (_FFN + r"w2\.weight", "ffn.down.weight"),
    (_FFN + r"gate\.weight", "ffn.router.weight"),
    (_FFN + r"expert_bias", "ffn.score_bias"),
    (_FFN + r"experts\.(?P<expert>\d+)\.(?P<part>w1|w3)\.weight", "ffn.experts.{expert}.gate_up.weight"),
    (_FFN + r"experts\.(?P<expert>\d+)\.(?P<part>gate|up)_proj\.weight", "ffn.experts.{expert}.gate_up.weight"),
    (_FFN + r"experts\.(?P<expert>\d+)\.(?:w2|down_proj)\.weight", "ffn.experts.{expert}.down.weight"),
    (LAYER + r"operator_norm\.weight", "attn_norm.weight"),
    (LAYER + r"ffn_norm\.weight", "ffn_norm.weight"),
    (r"embedding_norm\.weight", "norm.weight"),
)
_NAMES = replace(
    LLAMA, rules=(*LLAMA.rules, *_RULES), convert={"attn.conv.weight": taps_first}, prepare=unstacked("feed_forward")
)
_KINDS = ("conv", "full_attention")


def lfm2(config: Any) -> DecoderSpec:
    """LFM2, dense."""
    size = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        size = int(2 * size / 3)
        if config.block_ffn_dim_multiplier is not None:
            multiple = config.block_multiple_of
            size = -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple
    return _decoder(config, [GatedMLP(size=size)] * config.num_hidden_layers)


def lfm2_moe(config: Any) -> DecoderSpec:
    """LFM2 with experts behind its first layers.

    Raises:
        UnsupportedModel: experts are chosen without a bias.
    """
    if not config.use_expert_bias:
        raise UnsupportedModel("use_expert_bias must be true for models of type 'lfm2_moe'")
    experts = MoE(
        size=config.moe_intermediate_size,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        router=GroupedSigmoidRouter(
            groups=1, top_groups=1, renormalize=config.norm_topk_prob, scale=config.routed_scaling_factor
        ),
        expert=GatedExperts(),
    )
    dense = GatedMLP(size=config.intermediate_size)
    layers = range(config.num_hidden_layers)
    return _decoder(config, [dense if index < config.num_dense_layers else experts for index in layers])


def _decoder(config: Any, ffns: Sequence[FeedForward]) -> DecoderSpec:
    kinds = list(config.layer_types or ())
    if len(kinds) != len(ffns) or not set(kinds) <= set(_KINDS):
        raise UnsupportedModel(f"layer_types must name {len(ffns)} layers; accepted are {' and '.join(_KINDS)}")
    conv = ShortConvolution(size=config.hidden_size, width=config.conv_L_cache, bias=bool(config.conv_bias))
    attn = attention(config, qk_norm=QKNorm.HEAD)
    layers = [Layer(attn=conv if kind == "conv" else attn, ffn=ffn) for kind, ffn in zip(kinds, ffns, strict=True)]
    return DecoderSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=tuple(layers),
        norm=RMSNormSpec(eps=config.norm_eps),
        max_positions=max_positions(config),
        tied=bool(config.tie_word_embeddings),
    )


FAMILIES = (
    Family(name="lfm2", config_types=("lfm2",), spec=lfm2, tensors=_NAMES),
    Family(name="lfm2_moe", config_types=("lfm2_moe",), spec=lfm2_moe, tensors=_NAMES),
)
