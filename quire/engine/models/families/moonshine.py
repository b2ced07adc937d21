"""Moonshine: an encoder of samples and a decoder, both with rotary positions (Jeffries et al. 2024)."""

from __future__ import annotations

from typing import Any

from quire.engine.client.convolutions import count_positions
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.ctc import SAMPLE_RATE, WINDOW_SECONDS
from quire.engine.models.families.rope import rope_of
from quire.engine.models.specs.audio import StemNorm, WaveConv, WaveStem
from quire.engine.models.specs.decoder import (
    AudioEncoderSpec,
    CrossAttention,
    DecoderSpec,
    GatedMLP,
    GroupedQueryAttention,
    Layer,
    LayerNormSpec,
    PlainMLP,
)

_NORM = LayerNormSpec(eps=1e-5, bias=False)


def moonshine(config: Any) -> DecoderSpec:
    """Moonshine.

    Raises:
        UnsupportedModel: heads differ in number, or projections have biases.
    """
    hidden, heads = config.hidden_size, config.decoder_num_attention_heads
    counts = (config.encoder_num_attention_heads, config.encoder_num_key_value_heads)
    if any(count != heads for count in (*counts, config.decoder_num_key_value_heads)):
        raise UnsupportedModel("moonshine with different numbers of heads is not supported")
    if config.attention_bias:
        raise UnsupportedModel("moonshine with attention_bias is not supported")
    dim = getattr(config, "head_dim", None) or hidden // heads
    rope = rope_of(config, dim, interleaved=True, partial=True)
    attn = GroupedQueryAttention(heads=heads, kv_heads=heads, head_dim=dim, scale=dim**-0.5, rope=rope)
    layer = Layer(
        attn=attn,
        cross=CrossAttention(heads=heads, head_dim=dim, scale=dim**-0.5, bias=False),
        ffn=GatedMLP(size=config.intermediate_size, act=config.decoder_hidden_act, bias=True),
    )
    encoder_layer = Layer(
        attn=attn, ffn=PlainMLP(size=config.intermediate_size, act=config.encoder_hidden_act, bias=True)
    )
    stem = _stem(hidden)
    return DecoderSpec(
        hidden=hidden,
        vocab=config.vocab_size,
        layers=(layer,) * config.decoder_num_hidden_layers,
        norm=_NORM,
        max_positions=config.max_position_embeddings,
        tied=config.tie_word_embeddings,
        encoder=AudioEncoderSpec(
            stem=stem,
            positions=None,
            hidden=hidden,
            layers=(encoder_layer,) * config.encoder_num_hidden_layers,
            norm=_NORM,
            max_positions=count_positions(stem.convolutions, round(WINDOW_SECONDS * SAMPLE_RATE)),
        ),
    )


def _stem(hidden: int) -> WaveStem:
    first = WaveConv(size=hidden, kernel=127, stride=64, act="tanh", norm=StemNorm.ALL, norm_last=True)
    second = WaveConv(size=2 * hidden, kernel=7, stride=3, act="gelu", bias=True)
    return WaveStem(convs=(first, second, WaveConv(size=hidden, kernel=3, stride=2, act="gelu", bias=True)))
