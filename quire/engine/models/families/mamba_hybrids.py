"""Hybrids of state spaces and attention whose layers have a feed-forward each: Granite 4, Bamba, Jamba."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.config.rope import rope_of
from quire.engine.models.families.llama import (
    LLAMA,
    attention,
    biased_attention,
    biased_mlp,
    decoder,
    granite,
    head_dim,
    mixed_layers,
    mlp,
)
from quire.engine.models.families.mamba import MIXER_CONVERT, check_activation, head_state_space, mixer_rules
from quire.engine.models.families.mixtral import softmax_experts
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    FeedForward,
    GatedExperts,
    GatedMLP,
    Layer,
    MoE,
    SoftmaxRouter,
)
from quire.engine.models.specs.stacked_experts import unstacked
from quire.engine.models.specs.state_space import ChannelStateSpace
from quire.engine.models.specs.tensor_names import KIND, LAYER

_FFN = LAYER + r"feed_forward\."
_GRANITE = (
    (LAYER + r"shared_mlp\.input_linear\.weight", "ffn.gate_up.weight"),
    (LAYER + r"shared_mlp\.(?P<part>gate|up)_proj\.weight", "ffn.gate_up.weight"),  # of GGUF files
    (LAYER + r"shared_mlp\.output_linear\.weight", "ffn.down.weight"),
    (LAYER + r"shared_mlp\.input_linear\.weight", "ffn.shared.gate_up.weight"),
    (LAYER + r"shared_mlp\.(?P<part>gate|up)_proj\.weight", "ffn.shared.gate_up.weight"),
    (LAYER + r"shared_mlp\.output_linear\.weight", "ffn.shared.down.weight"),
    (LAYER + r"block_sparse_moe\.router\.layer\.weight", "ffn.router.weight"),
)
_OTHERS = (
    (_FFN + r"(?P<part>gate|up)_proj" + KIND, "ffn.gate_up.{kind}"),
    (_FFN + r"down_proj" + KIND, "ffn.down.{kind}"),
    (_FFN + r"router\.weight", "ffn.router.weight"),
    (_FFN + r"experts\.(?P<expert>\d+)\.(?P<part>gate|up)_proj\.weight", "ffn.experts.{expert}.gate_up.weight"),
    (_FFN + r"experts\.(?P<expert>\d+)\.down_proj\.weight", "ffn.experts.{expert}.down.weight"),
    (LAYER + r"pre_ff_layernorm\.weight", "ffn_norm.weight"),
    (r"final_layernorm\.weight", "norm.weight"),
)
_GRANITE_NAMES = replace(
    LLAMA,
    rules=(*LLAMA.rules, *_GRANITE, *mixer_rules("mamba")),
    convert=MIXER_CONVERT,
    prepare=unstacked("block_sparse_moe"),
)
HYBRID_NAMES = replace(
    LLAMA,
    rules=(*LLAMA.rules, *_OTHERS, *mixer_rules("mamba")),
    convert=MIXER_CONVERT,
    prepare=unstacked("feed_forward"),
)


def granite_hybrid(config: Any) -> DecoderSpec:
    """Granite 4: Mamba 2 and attention, with Granite's scales; a feed-forward, or experts beside it."""
    shared = config.shared_intermediate_size
    ffn: FeedForward = GatedMLP(size=shared, act=config.hidden_act)
    if config.num_local_experts:
        ffn = replace(softmax_experts(config), shared=shared)
    spec = granite(config, ffn)
    attn = spec.layers[0].attn
    if config.position_embedding_type != "rope":
        attn = replace(attn, rope=None)
    attns = mixed_layers(config, head_state_space(config), attn)
    return replace(spec, layers=tuple(replace(spec.layers[0], attn=attn) for attn in attns))


def bamba(config: Any) -> DecoderSpec:
    """Bamba: Mamba 2, and attention with a partial rope."""
    attn = biased_attention(config, rope=rope_of(config, head_dim(config), partial=True))
    return decoder(
        config,
        [Layer(attn=attn, ffn=biased_mlp(config)) for attn in mixed_layers(config, head_state_space(config), attn)],
    )


def jamba(config: Any) -> DecoderSpec:
    """Jamba: Mamba with norms inside, and attention without positions; experts in some layers."""
    check_activation(config)
    bias = bool(config.mamba_proj_bias)
    mixer = ChannelStateSpace(
        size=config.mamba_expand * config.hidden_size,
        state=config.mamba_d_state,
        rank=config.mamba_dt_rank,
        width=config.mamba_d_conv,
        bias=bias,
        conv_bias=bool(config.mamba_conv_bias),
        norm_eps=config.rms_norm_eps,
    )
    experts = MoE(
        size=config.intermediate_size,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        router=SoftmaxRouter(renormalize=False),
        expert=GatedExperts(act=config.hidden_act),
    )
    ffns = [experts if count > 1 else mlp(config) for count in config.layers_num_experts]
    attns = mixed_layers(config, mixer, attention(config, rope=None))
    return decoder(config, [Layer(attn=attn, ffn=ffn) for attn, ffn in zip(attns, ffns, strict=True)])


FAMILIES = (
    Family(name="bamba", config_types=("bamba",), spec=bamba, tensors=HYBRID_NAMES),
    Family(name="granitemoehybrid", config_types=("granitemoehybrid",), spec=granite_hybrid, tensors=_GRANITE_NAMES),
    Family(name="jamba", config_types=("jamba",), spec=jamba, tensors=HYBRID_NAMES),
)
