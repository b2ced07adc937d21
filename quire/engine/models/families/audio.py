"""Language models that read audio: an encoder whose outputs take the place of embeddings of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.whisper import WHISPER_NORM, whisper_attention
from quire.engine.models.specs.audio import ChunkedConvStem, ConvStem, LearnedPositions, Projector
from quire.engine.models.specs.decoder import AudioEncoderSpec, DecoderSpec, Layer, PlainMLP

# Features of one chunk of Qwen 3 ASR that its encoder's convolutions halve three times.
_HALVINGS = 3


def qwen2_audio(config: Any, text: DecoderSpec) -> DecoderSpec:
    """Qwen 2 Audio: whisper's encoder, whose positions are averaged in pairs."""
    projector = Projector(sizes=(text.hidden,), bias=True)
    return replace(text, tied=False, encoder=replace(_whisper_like(config), averaged=2, projector=projector))


def voxtral(config: Any, text: DecoderSpec) -> DecoderSpec:
    """Voxtral: whisper's encoder, of whose positions as many are joined as the projector reads."""
    audio = config.audio_config
    joined, rest = divmod(audio.intermediate_size, audio.hidden_size)
    if rest or not joined:
        raise UnsupportedModel(
            f"the projector reads {audio.intermediate_size} elements, not a multiple of {audio.hidden_size}"
        )
    projector = Projector(sizes=(text.hidden, text.hidden), bias=False, act=config.projector_hidden_act)
    return replace(text, tied=False, encoder=replace(_whisper_like(config), joined=joined, projector=projector))


def qwen3_asr(config: Any, text: DecoderSpec) -> DecoderSpec:
    """Qwen 3 ASR: convolutions over seconds of audio, and attention within windows of several of them."""
    audio = config.audio_config
    chunk = 2 * audio.n_window
    if audio.n_window_infer % chunk:
        raise UnsupportedModel(f"n_window_infer is {audio.n_window_infer}, not a multiple of {chunk}")
    positions = -(-chunk // (1 << _HALVINGS))
    if audio.max_position_embeddings < positions:
        raise UnsupportedModel(f"max_position_embeddings is {audio.max_position_embeddings}; needed are {positions}")
    encoder = AudioEncoderSpec(
        # The activations of the convolutions do not depend on the config.
        stem=ChunkedConvStem(rows=audio.num_mel_bins, channels=audio.downsample_hidden_size, chunk=chunk, act="gelu"),
        positions=None,
        hidden=audio.hidden_size,
        layers=_layers(audio),
        norm=WHISPER_NORM,
        max_positions=audio.n_window_infer // chunk * positions,
        projector=Projector(sizes=(audio.hidden_size, audio.output_dim), bias=True, act=audio.activation_function),
    )
    return replace(text, tied=bool(config.tie_word_embeddings), encoder=encoder)


def _whisper_like(config: Any) -> AudioEncoderSpec:
    audio = config.audio_config
    return AudioEncoderSpec(
        stem=ConvStem(channels=audio.num_mel_bins, act="gelu"),
        positions=LearnedPositions(),
        hidden=audio.hidden_size,
        layers=_layers(audio),
        norm=WHISPER_NORM,
        max_positions=audio.max_source_positions,
    )


def _layers(audio: Any) -> tuple[Layer, ...]:
    layer = Layer(
        attn=whisper_attention(audio.hidden_size, audio.num_attention_heads),
        ffn=PlainMLP(size=audio.intermediate_size, act=audio.activation_function),
    )
    count: int = audio.num_hidden_layers
    return (layer,) * count
