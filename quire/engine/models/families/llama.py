"""Llama, and dense architectures that differ from it in a few options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.rope import max_positions, rope_of
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    Embeddings,
    FeedForward,
    GatedMLP,
    GroupedQueryAttention,
    Layer,
    QKNorm,
    RMSNormSpec,
)


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
        tied=bool(config.tie_word_embeddings),
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


def phi3(config: Any) -> DecoderSpec:
    """Phi-3: Mistral with a partial rope. Its checkpoints have fused projections."""
    rope = rope_of(config, head_dim(config), partial=True)
    return uniform(config, attention(config, window=config.sliding_window, rope=rope))


def qwen2(config: Any) -> DecoderSpec:
    """Qwen 2 and 2.5."""
    attn = attention(config, qkv_bias=True, out_bias=False)
    return decoder(config, [Layer(attn=one, ffn=mlp(config)) for one in windowed(config, attn)])


def qwen3(config: Any) -> DecoderSpec:
    """Qwen 3, dense."""
    attn = biased_attention(config, qk_norm=QKNorm.HEAD)
    return decoder(config, [Layer(attn=one, ffn=mlp(config)) for one in windowed(config, attn)])


def olmo2(config: Any) -> DecoderSpec:
    """OLMo 2: norms after the branches only."""
    return uniform(config, biased_attention(config, qk_norm=QKNorm.ALL), pre_norm=False, branch_output_norm=True)


def granite(config: Any) -> DecoderSpec:
    """Granite 3, dense: scales of embeddings, attention scores, residuals and logits."""
    if config.attention_multiplier <= 0:
        raise UnsupportedModel(f"attention_multiplier must be above 0, not {config.attention_multiplier}")
    if config.logits_scaling == 0:
        raise UnsupportedModel("logits_scaling must not be 0")
    attn = biased_attention(config, scale=config.attention_multiplier)
    spec = uniform(config, attn, biased_mlp(config), residual_scale=config.residual_multiplier)
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
