"""Whisper, and models of its architecture with fewer layers."""

from __future__ import annotations

from typing import Any

from quire.engine.models.specs.audio import ConvStem, LearnedPositions
from quire.engine.models.specs.decoder import (
    AudioEncoderSpec,
    CrossAttention,
    DecoderSpec,
    Embeddings,
    GroupedQueryAttention,
    Layer,
    LayerNormSpec,
    PlainMLP,
)

WHISPER_NORM = LayerNormSpec(eps=1e-5)


def whisper(config: Any) -> DecoderSpec:
    """Whisper: learned positions, norms before the branches, keys without bias."""
    hidden, act = config.d_model, config.activation_function
    heads, dim = config.decoder_attention_heads, config.d_model // config.decoder_attention_heads
    layer = Layer(
        attn=whisper_attention(hidden, heads),
        cross=CrossAttention(heads=heads, head_dim=dim, scale=dim**-0.5),
        ffn=PlainMLP(size=config.decoder_ffn_dim, act=act),
    )
    encoder_layer = Layer(
        attn=whisper_attention(hidden, config.encoder_attention_heads),
        ffn=PlainMLP(size=config.encoder_ffn_dim, act=act),
    )
    return DecoderSpec(
        hidden=hidden,
        vocab=config.vocab_size,
        layers=(layer,) * config.decoder_layers,
        norm=WHISPER_NORM,
        max_positions=config.max_target_positions,
        embeddings=Embeddings(positions=config.max_target_positions),
        tied=config.tie_word_embeddings,
        encoder=AudioEncoderSpec(
            stem=ConvStem(channels=config.num_mel_bins, act="gelu"),  # independent of activation_function
            positions=LearnedPositions(),
            hidden=hidden,
            layers=(encoder_layer,) * config.encoder_layers,
            norm=WHISPER_NORM,
            max_positions=config.max_source_positions,
        ),
    )


def whisper_attention(hidden: int, heads: int) -> GroupedQueryAttention:
    """Attention with biases and without positions."""
    dim = hidden // heads
    return GroupedQueryAttention(
        heads=heads, kv_heads=heads, head_dim=dim, scale=dim**-0.5, rope=None, qkv_bias=True, out_bias=True
    )
