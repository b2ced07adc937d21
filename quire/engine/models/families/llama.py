"""Llama, and dense architectures that differ from it in a few options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine.models.config.rope import max_positions, rope_of, rope_parameters
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import (
    Attention,
    DecoderSpec,
    Embeddings,
    FeedForward,
    GatedMLP,
    GroupedQueryAttention,
    Layer,
    QKNorm,
    QueryTemperature,
    RMSNormSpec,
)
from quire.engine.models.specs.tensor_names import KIND, LAYER, WeightNames

_EXPERTS = LAYER + r"(?:mlp|block_sparse_moe)\.experts\."
_RULES = (
    (r"embed_tokens\.weight", "embed.weight"),
    (r"lm_head\.weight", "head.weight"),
    (r"norm\.weight", "norm.weight"),
    (LAYER + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, "attn.qkv.{kind}"),
    (LAYER + r"self_attn\.qkv_proj" + KIND, "attn.qkv.{kind}"),
    (LAYER + r"self_attn\.q_proj\.weight", "attn.q_b.weight"),  # latent attention without a query rank
    (LAYER + r"self_attn\.o_proj" + KIND, "attn.out.{kind}"),
    (LAYER + r"self_attn\.(?P<side>q|k)_norm\.weight", "attn.{side}_norm.weight"),
    (LAYER + r"self_attn\.sinks", "attn.sinks"),
    (LAYER + r"self_attn\.(?P<side>q|kv)_a_proj(?:_with_mqa)?" + KIND, "attn.{side}_a.{kind}"),
    (LAYER + r"self_attn\.(?P<side>q|kv)_a_layernorm\.weight", "attn.{side}_a_norm.weight"),
    (LAYER + r"self_attn\.(?P<side>q|kv)_b_proj\.weight", "attn.{side}_b.weight"),
    (LAYER + r"mlp\.(?P<part>gate|up)_proj" + KIND, "ffn.gate_up.{kind}"),
    (LAYER + r"mlp\.gate_up_proj" + KIND, "ffn.gate_up.{kind}"),
    (LAYER + r"mlp\.down_proj" + KIND, "ffn.down.{kind}"),
    (LAYER + r"mlp\.shared_experts?\.(?P<part>gate|up)_proj\.weight", "ffn.shared.gate_up.weight"),
    (LAYER + r"mlp\.shared_experts?\.down_proj\.weight", "ffn.shared.down.weight"),
    (LAYER + r"mlp\.shared_expert_gate\.weight", "ffn.shared_gate.weight"),
    (LAYER + r"(?:mlp|block_sparse_moe)\.(?:gate|router)" + KIND, "ffn.router.{kind}"),
    (LAYER + r"(?:mlp|mlp\.gate|block_sparse_moe)\.e_score_correction_bias", "ffn.score_bias"),
    (_EXPERTS + r"(?P<expert>\d+)\.(?P<part>gate|up)_proj" + KIND, "ffn.experts.{expert}.gate_up.{kind}"),
    (_EXPERTS + r"(?P<expert>\d+)\.down_proj" + KIND, "ffn.experts.{expert}.down.{kind}"),
    (_EXPERTS + r"(?P<expert>\d+)\.(?P<part>w1|w3)\.weight", "ffn.experts.{expert}.gate_up.weight"),
    (_EXPERTS + r"(?P<expert>\d+)\.w2\.weight", "ffn.experts.{expert}.down.weight"),
    (_EXPERTS + r"(?P<stacked>gate_up|down)_proj", "ffn.experts.{{expert}}.{stacked}.weight"),
    (_EXPERTS + r"(?P<stacked>gate_up|down)_proj_bias", "ffn.experts.{{expert}}.{stacked}.bias"),
)
_IGNORED = r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
# Llama's second norm precedes the feed-forward; in models with post-norms it follows the attention.
_NORMS = (
    (LAYER + r"input_layernorm\.weight", "attn_norm.weight"),
    (LAYER + r"post_attention_layernorm\.weight", "ffn_norm.weight"),
)
_POST_NORMS = (
    (LAYER + r"input_layernorm\.weight", "attn_norm.weight"),
    (LAYER + r"post_attention_layernorm\.weight", "attn_output_norm.weight"),
    (LAYER + r"pre_feedforward_layernorm\.weight", "ffn_norm.weight"),
    (LAYER + r"post_feedforward_layernorm\.weight", "ffn_output_norm.weight"),
)
_HEADS = (
    (r"score" + KIND, "heads.classify.0.{kind}"),
    (r"score\.0" + KIND, "heads.classify.0.{kind}"),  # reward models
    (r"score\.2" + KIND, "heads.classify.1.{kind}"),
)

LLAMA = WeightNames((*_RULES, *_NORMS, *_HEADS), ignored=_IGNORED)
LLAMA_OUTPUT_NORMS = WeightNames((*_RULES, *_POST_NORMS, *_HEADS), ignored=_IGNORED)
# With layer norms that have biases, and plain feed-forward layers.
_LAYER_NORMS = (
    *LLAMA.rules,
    (LAYER + r"self_attn\.dense" + KIND, "attn.out.{kind}"),
    (LAYER + r"mlp\.(?:fc1|c_fc)" + KIND, "ffn.up.{kind}"),
    (LAYER + r"mlp\.(?:fc2|c_proj)" + KIND, "ffn.down.{kind}"),
    (LAYER + r"input_layernorm\.bias", "attn_norm.bias"),
    (LAYER + r"post_attention_layernorm\.bias", "ffn_norm.bias"),
    (r"(?:norm|final_layernorm)" + KIND, "norm.{kind}"),
    (r"lm_head\.bias", "head.bias"),
)
LLAMA_LAYER_NORMS = WeightNames(_LAYER_NORMS, ignored=rf"{_IGNORED}|lm_head\.weight")


def head_dim(config: Any) -> int:
    """Elements of a head."""
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim


def attention(config: Any, **overrides: Any) -> GroupedQueryAttention:
    """Llama's attention without biases, with some fields overridden."""
    dim = head_dim(config)
    if "rope" not in overrides:
        overrides["rope"] = rope_of(config, dim)
    fields = {
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": dim,
        "scale": dim**-0.5,
        "qkv_bias": False,
        "out_bias": False,
    }
    return GroupedQueryAttention(**{**fields, **overrides})


def biased_attention(config: Any, **overrides: Any) -> GroupedQueryAttention:
    """Llama's attention with `attention_bias`, which some architectures ignore."""
    bias = bool(config.attention_bias)
    return attention(config, **{"qkv_bias": bias, "out_bias": bias, **overrides})


def mlp(config: Any, *, act: str | None = None, bias: bool = False) -> GatedMLP:
    """Llama's feed-forward layer; `act` if the config has it under another name than `hidden_act`."""
    return GatedMLP(size=config.intermediate_size, act=config.hidden_act if act is None else act, bias=bias)


def biased_mlp(config: Any) -> GatedMLP:
    """Llama's feed-forward layer with `mlp_bias`, which other architectures ignore."""
    return mlp(config, bias=bool(config.mlp_bias))


def decoder(config: Any, layers: Sequence[Layer], *, norm_offset: float = 0.0, **overrides: Any) -> DecoderSpec:
    """A decoder with the given layers and RMS norms."""
    return DecoderSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=tuple(layers),
        norm=RMSNormSpec(eps=config.rms_norm_eps, offset=norm_offset),
        max_positions=max_positions(config),
        tied=bool(getattr(config, "tie_word_embeddings", False)),  # parts of other models leave it out
        **overrides,
    )


def uniform(config: Any, attn: GroupedQueryAttention, ffn: FeedForward | None = None, **layer: Any) -> DecoderSpec:
    """A decoder whose layers are identical."""
    shared = Layer(attn=attn, ffn=ffn or mlp(config), **layer)
    return decoder(config, [shared] * config.num_hidden_layers)


def check_layer_types(config: Any) -> None:
    """Raise UnsupportedModel for layers that are neither full attention nor attention with a given window."""
    for kind in sorted(set(config.layer_types) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(
            f"layers of type {kind!r} are not supported; supported are full_attention and sliding_attention"
        )
    if "sliding_attention" in config.layer_types and config.sliding_window is None:
        raise UnsupportedModel("the model's config.json has layers of type sliding_attention, but no sliding_window")


def mixed_layers(config: Any, linear: Attention, full: Attention) -> list[Attention]:
    """Return what each layer has in the place of attention, by `layer_types`: a layer with a state, or attention.

    Raises:
        UnsupportedModel: there are layers of another type, or too few or too many.
    """
    kinds = {"linear_attention": linear, "full_attention": full}
    for kind in sorted(set(config.layer_types) - set(kinds)):
        raise UnsupportedModel(
            f"layers of type {kind!r} are not supported; supported are full_attention and linear_attention"
        )
    if len(config.layer_types) != config.num_hidden_layers:
        raise UnsupportedModel(f"layer_types must name {config.num_hidden_layers} layers")
    return [kinds[kind] for kind in config.layer_types]


def windowed(config: Any, attn: GroupedQueryAttention) -> list[GroupedQueryAttention]:
    """The attention of each layer, with a sliding window where `layer_types` has one.

    Raises:
        UnsupportedModel: there are layers of another type, or the window's length is missing.
    """
    check_layer_types(config)
    sliding = replace(attn, window=config.sliding_window)
    return [sliding if kind == "sliding_attention" else attn for kind in config.layer_types]


def llama(config: Any) -> DecoderSpec:
    """Llama 1 to 3."""
    return uniform(config, biased_attention(config), biased_mlp(config))


def mistral(config: Any) -> DecoderSpec:
    """Mistral: a sliding window on every layer, if any."""
    return uniform(config, attention(config, window=config.sliding_window))


def ministral(config: Any) -> DecoderSpec:
    """Ministral: a sliding window on some layers."""
    return decoder(config, [Layer(attn=attn, ffn=mlp(config)) for attn in windowed(config, attention(config))])


def cwm(config: Any) -> DecoderSpec:
    """CWM: a sliding window on some layers."""
    attns = windowed(config, attention(config))
    return decoder(config, [Layer(attn=attn, ffn=biased_mlp(config)) for attn in attns])


def ministral3(config: Any) -> DecoderSpec:
    """Ministral 3: Mistral whose queries grow with their positions."""
    params = rope_parameters(config)
    growth, length = params.get("llama_4_scaling_beta"), params.get("original_max_position_embeddings")
    if not isinstance(growth, int | float) or not isinstance(length, int):
        raise UnsupportedModel(
            "rope_parameters of a model of type 'ministral3' need llama_4_scaling_beta, a number, and "
            "original_max_position_embeddings, an integer"
        )
    temperature = QueryTemperature(growth=growth, length=length)
    return uniform(config, attention(config, window=config.sliding_window, temperature=temperature))


def phi3(config: Any) -> DecoderSpec:
    """Phi-3: Mistral with a partial rope. Its checkpoints have fused projections."""
    rope = rope_of(config, head_dim(config), partial=True)
    return uniform(config, attention(config, window=config.sliding_window, rope=rope))


def qwen2(config: Any) -> DecoderSpec:
    """Qwen 2 and 2.5."""
    attn = attention(config, qkv_bias=True, out_bias=False)
    return decoder(config, [Layer(attn=layer_attn, ffn=mlp(config)) for layer_attn in windowed(config, attn)])


def qwen3(config: Any) -> DecoderSpec:
    """Qwen 3, dense."""
    attn = biased_attention(config, qk_norm=QKNorm.HEAD)
    has_windows = getattr(config, "layer_types", None) is not None
    attns = windowed(config, attn) if has_windows else [attn] * config.num_hidden_layers
    return decoder(config, [Layer(attn=layer_attn, ffn=mlp(config)) for layer_attn in attns])


def olmo2(config: Any) -> DecoderSpec:
    """OLMo 2: norms after the branches only."""
    return uniform(config, biased_attention(config, qk_norm=QKNorm.ALL), pre_norm=False, branch_output_norm=True)


def olmo3(config: Any) -> DecoderSpec:
    """OLMo 3: OLMo 2 with sliding windows on some layers, which have a rope of their own."""
    full, sliding = (rope_of(config, head_dim(config), f"{kind}_attention") for kind in ("full", "sliding"))
    attns = windowed(config, biased_attention(config, qk_norm=QKNorm.ALL, rope=full))
    ropes = [full if attn.window is None else sliding for attn in attns]
    layers = [
        Layer(attn=replace(attn, rope=rope), ffn=mlp(config), pre_norm=False, branch_output_norm=True)
        for attn, rope in zip(attns, ropes, strict=True)
    ]
    return decoder(config, layers)


def seed_oss(config: Any) -> DecoderSpec:
    """Seed-OSS: Llama with biases that are set one by one."""
    biases = {"qkv_bias": bool(config.attention_bias), "out_bias": bool(config.attention_out_bias)}
    return uniform(config, attention(config, **biases), biased_mlp(config))


def granite(config: Any, ffn: FeedForward | None = None) -> DecoderSpec:
    """Granite 3: scales of embeddings, attention scores, residuals and logits. `ffn`: None: a dense one."""
    if config.attention_multiplier <= 0:
        raise UnsupportedModel(f"attention_multiplier must be above 0, not {config.attention_multiplier}")
    if config.logits_scaling == 0:
        raise UnsupportedModel("logits_scaling must not be 0")
    attn = biased_attention(config, scale=config.attention_multiplier)
    spec = uniform(config, attn, ffn or biased_mlp(config), residual_scale=config.residual_multiplier)
    embeddings = Embeddings(scale=float(config.embedding_multiplier))
    return replace(spec, embeddings=embeddings, logit_scale=1.0 / config.logits_scaling)


def smollm3(config: Any) -> DecoderSpec:
    """SmolLM 3: some layers have no position embedding."""
    attns = windowed(config, biased_attention(config))
    layers = [
        Layer(attn=attn if has_rope else replace(attn, rope=None), ffn=biased_mlp(config))
        for attn, has_rope in zip(attns, config.no_rope_layers[: len(attns)], strict=True)
    ]
    return decoder(config, layers)


FAMILIES = (
    Family(name="cwm", config_types=("cwm",), spec=cwm, tensors=LLAMA),
    Family(name="granite", config_types=("granite",), spec=granite, tensors=LLAMA),
    Family(name="llama", config_types=("llama",), spec=llama, tensors=LLAMA),
    Family(name="mistral", config_types=("mistral",), spec=mistral, tensors=LLAMA),
    Family(name="ministral", config_types=("ministral",), spec=ministral, tensors=LLAMA),
    Family(name="ministral3", config_types=("ministral3",), spec=ministral3, tensors=LLAMA),
    Family(name="olmo2", config_types=("olmo2",), spec=olmo2, tensors=LLAMA_OUTPUT_NORMS),
    Family(name="olmo3", config_types=("olmo3",), spec=olmo3, tensors=LLAMA_OUTPUT_NORMS),
    Family(name="phi3", config_types=("phi3",), spec=phi3, tensors=LLAMA),
    Family(
        name="qwen2",
        config_types=("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"),
        spec=qwen2,
        tensors=LLAMA,
    ),
    Family(name="qwen3", config_types=("qwen3", "qwen3_vl_text"), spec=qwen3, tensors=LLAMA),
    Family(name="seed_oss", config_types=("seed_oss",), spec=seed_oss, tensors=LLAMA),
    Family(name="smollm3", config_types=("smollm3",), spec=smollm3, tensors=LLAMA),
)
