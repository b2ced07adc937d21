"""Llama, and dense architectures that differ from it in a few options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine.models.archs.rope import max_positions, rope_of
from quire.engine.models.spec import (
    DecoderSpec,
    FeedForward,
    GatedMLP,
    GroupedAttention,
    Layer,
    QKNorm,
)


def attention(config: Any, **overrides: Any) -> GroupedAttention:
    """Llama's attention, with some fields overridden."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if "rope" not in overrides:
        overrides["rope"] = rope_of(config, dim)
    fields = {
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": dim,
        "scale": dim**-0.5,
        "qkv_bias": bool(getattr(config, "attention_bias", False)),
        "out_bias": bool(getattr(config, "attention_bias", False)),
    }
    return GroupedAttention(**{**fields, **overrides})


def mlp(config: Any) -> GatedMLP:
    """Llama's feed-forward layer."""
    act = getattr(config, "hidden_act", None) or config.hidden_activation
    return GatedMLP(size=config.intermediate_size, act=act, bias=bool(getattr(config, "mlp_bias", False)))


def decoder(config: Any, layers: Sequence[Layer], **overrides: Any) -> DecoderSpec:
    """A decoder with the given layers."""
    return DecoderSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=tuple(layers),
        eps=config.rms_norm_eps,
        max_positions=max_positions(config),
        tied=bool(config.tie_word_embeddings),
        **overrides,
    )


def uniform(config: Any, attn: GroupedAttention, ffn: FeedForward | None = None, **layer: Any) -> DecoderSpec:
    """A decoder whose layers are identical."""
    shared = Layer(attn=attn, ffn=ffn or mlp(config), **layer)
    return decoder(config, [shared] * config.num_hidden_layers)


def windowed(config: Any, attn: GroupedAttention) -> list[GroupedAttention]:
    """The attention of each layer, with a sliding window where `layer_types` has one."""
    sliding = replace(attn, window=config.sliding_window)
    return [sliding if kind == "sliding_attention" else attn for kind in config.layer_types]


def llama(config: Any) -> DecoderSpec:
    """Llama 1 to 3."""
    return uniform(config, attention(config))


def mistral(config: Any) -> DecoderSpec:
    """Mistral and Phi-3: a sliding window on every layer, if any. Phi-3's checkpoints have fused projections."""
    return uniform(config, attention(config, window=config.sliding_window))


def qwen2(config: Any) -> DecoderSpec:
    """Qwen 2 and 2.5."""
    attn = attention(config, qkv_bias=True, out_bias=False)
    return decoder(config, [Layer(attn=one, ffn=mlp(config)) for one in windowed(config, attn)])


def qwen3(config: Any) -> DecoderSpec:
    """Qwen 3, dense."""
    attn = attention(config, qk_norm=QKNorm.HEAD)
    return decoder(config, [Layer(attn=one, ffn=mlp(config)) for one in windowed(config, attn)])


def olmo2(config: Any) -> DecoderSpec:
    """OLMo 2: norms after the branches only."""
    return uniform(config, attention(config, qk_norm=QKNorm.ALL), pre_norm=False, post_norm=True)


def granite(config: Any) -> DecoderSpec:
    """Granite 3, dense: scales of embeddings, attention scores, residuals and logits."""
    spec = uniform(
        config, attention(config, scale=config.attention_multiplier), residual_scale=config.residual_multiplier
    )
    return replace(spec, embed_scale=float(config.embedding_multiplier), logit_scale=1.0 / config.logits_scaling)


def smollm3(config: Any) -> DecoderSpec:
    """SmolLM 3: some layers have no position embedding."""
    layers = [
        Layer(attn=attn if has_rope else replace(attn, rope=None), ffn=mlp(config))
        for attn, has_rope in zip(windowed(config, attention(config)), config.no_rope_layers, strict=True)
    ]
    return decoder(config, layers)
