"""Voxtral Realtime: a causal encoder of audio, whose outputs are added to the embeddings of a Mistral's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.llama import attention, mistral
from quire.engine.models.specs.audio import CausalConvStem, Projector
from quire.engine.models.specs.decoder import AudioEncoderSpec, DecoderSpec, GatedMLP, Layer, RMSNormSpec

_HALVINGS = 2  # columns of features that the stem makes one position of


def voxtral_realtime(config: Any) -> DecoderSpec:
    """Voxtral Realtime, without the layers that read the delay: they are folded into norms, see `fold_delay`."""
    text, audio, joined = mistral(config.text_config), config.audio_config, config.downsample_factor
    if config.audio_length_per_tok != _HALVINGS * joined:
        raise UnsupportedModel(
            f"audio_length_per_tok is {config.audio_length_per_tok}; it must be {_HALVINGS} * downsample_factor, "
            f"which is {joined}"
        )
    layer = Layer(
        attn=attention(audio, window=audio.sliding_window, qkv_bias=True, out_bias=True),
        ffn=GatedMLP(size=audio.intermediate_size, act=audio.hidden_act, down_bias=True),
    )
    encoder = AudioEncoderSpec(
        stem=CausalConvStem(channels=audio.num_mel_bins, act="gelu"),  # whatever the other activations are
        positions=None,
        hidden=audio.hidden_size,
        layers=(layer,) * audio.num_hidden_layers,
        norm=RMSNormSpec(eps=audio.rms_norm_eps),
        max_positions=joined * text.max_positions,
        joined=joined,
        projector=Projector(sizes=(text.hidden, text.hidden), bias=False, act=config.projector_hidden_act),
    )
    return replace(text, tied=bool(config.tie_word_embeddings), encoder=encoder, adds_encoder=True)
