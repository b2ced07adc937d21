"""Phi-4 Multimodal, of which text and audio are supported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.specs.audio import Conv2dStem, Projector, TimeConv
from quire.engine.models.specs.decoder import (
    AudioEncoderSpec,
    ClippedBias,
    ConformerLayer,
    DecoderSpec,
    GatedMLP,
    GroupedQueryAttention,
    LayerNormSpec,
)

_CHUNK = 500  # positions that attend to each other: longer audio is encoded in chunks
# What other values would change is not implemented, in part because transformers' implementation fails with them.
_FIXED = {
    "chunk_size": -1,
    "bias_symmetric": False,
    "depthwise_multiplier": 1,
    "downsample_rate": 1,
    "nemo_activation": "relu",
}


def phi4_multimodal(config: Any, text: DecoderSpec) -> DecoderSpec:
    """Phi-4 Multimodal: a conformer with causal convolutions and biases of attention by distance.

    Raises:
        UnsupportedModel: an option of the encoder is not supported, or sizes do not match.
    """
    audio = config.audio_config
    for name, value in _FIXED.items():
        if getattr(audio, name) != value:
            raise UnsupportedModel(f"audio_config: {name} is {getattr(audio, name)!r}; supported is {value!r}")
    hidden, heads, reduction = audio.hidden_size, audio.num_attention_heads, audio.time_reduction
    for name in ("ext_pw_out_channel", "depthwise_separable_out_channel"):
        if getattr(audio, name) != hidden:
            raise UnsupportedModel(f"audio_config: {name} is {getattr(audio, name)}, not hidden_size, {hidden}")
    if type(reduction) is not int or reduction < 2 or reduction & (reduction - 1):
        raise UnsupportedModel(f"audio_config: time_reduction is {reduction!r}, not a power of 2")
    if hidden % heads:
        raise UnsupportedModel(f"audio_config: a hidden size of {hidden} cannot be split into {heads} heads")
    dim = hidden // heads
    layer = ConformerLayer(
        attn=GroupedQueryAttention(
            heads=heads,
            kv_heads=heads,
            head_dim=dim,
            scale=dim**-0.5,
            rope=None,
            qkv_bias=True,
            out_bias=True,
            relative_bias=ClippedBias(reach=audio.bias_max_distance),
        ),
        ffn=GatedMLP(size=audio.intermediate_size, act=audio.activation, bias=True),
        conv=TimeConv(
            size=hidden,
            kernel=audio.kernel_size,
            act=audio.conv_activation,
            gate=audio.conv_glu_type,
            causal=True,
            mixes=True,
        ),
    )
    encoder = AudioEncoderSpec(
        stem=Conv2dStem(
            bands=audio.input_size,
            channels=audio.nemo_conv_channels,
            layers=reduction.bit_length() - 1,
            standardized=True,
        ),
        positions=None,
        hidden=hidden,
        layers=(layer,) * audio.num_blocks,
        norm=LayerNormSpec(eps=1e-5),
        max_positions=_CHUNK,
        final_norm=False,
        chunk=_CHUNK,
        projector=Projector(sizes=(text.hidden, text.hidden), bias=True),
    )
    return replace(text, encoder=encoder)
