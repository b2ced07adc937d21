"""Granite Speech, and Granite Speech Plus."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.specs.audio import BlockAttention, LinearStem, QueryProjector, TimeConv
from quire.engine.models.specs.decoder import AudioEncoderSpec, ConformerLayer, DecoderSpec, LayerNormSpec, PlainMLP

_COLUMNS_PER_SECOND = 50  # two frames of a spectrogram are a column
_LONGEST = 300  # seconds of an item: its positions depend on each other, so it is encoded at once
_MAX_POSITIONS = _LONGEST * _COLUMNS_PER_SECOND


def granite_speech(config: Any, text: DecoderSpec) -> DecoderSpec:
    """Granite Speech: a conformer that attends within blocks, and queries for each window of its positions.

    In Granite Speech Plus these read the outputs of some layers beside the last one's.

    Raises:
        UnsupportedModel: sizes do not match, or the projector is of another kind.
    """
    audio = config.encoder_config
    if not 0 < audio.context_size <= audio.max_pos_emb:
        raise UnsupportedModel(f"context_size is {audio.context_size}, not from 1 to max_pos_emb, {audio.max_pos_emb}")
    layer = ConformerLayer(
        attn=BlockAttention(
            heads=audio.num_heads,
            head_dim=audio.dim_head,
            scale=audio.dim_head**-0.5,
            block=audio.context_size,
            reach=audio.max_pos_emb,
        ),
        ffn=PlainMLP(size=audio.hidden_dim * audio.feedforward_mult, act="silu"),
        conv=TimeConv(
            size=audio.hidden_dim * audio.conv_expansion_factor,
            kernel=audio.conv_kernel_size,
            act="silu",
            kernel_bias=False,
        ),
    )
    layers = [layer] * audio.num_layers
    if (middle := audio.num_layers // 2) > 0:
        layers[middle - 1] = replace(layer, feedback=audio.output_dim)
    concatenated = tuple(sorted(set(getattr(audio, "cat_hidden_layers", None) or ())))
    encoder = AudioEncoderSpec(
        stem=LinearStem(rows=audio.input_dim),
        positions=None,
        hidden=audio.hidden_dim,
        layers=tuple(layers),
        norm=LayerNormSpec(eps=1e-5),
        max_positions=_MAX_POSITIONS,
        final_norm=False,
        concatenated=concatenated,
        projector=_projector(config, text, audio.hidden_dim * (1 + len(concatenated))),
    )
    return replace(text, tied=bool(config.tie_word_embeddings), encoder=encoder)


def _projector(config: Any, text: DecoderSpec, source: int) -> QueryProjector:
    projector = config.projector_config
    if projector.model_type != "blip_2_qformer":
        raise UnsupportedModel(f"projector_config is of type {projector.model_type!r}; supported is blip_2_qformer")
    if projector.use_qformer_text_input:
        raise UnsupportedModel("projector_config with use_qformer_text_input is not supported")
    if projector.encoder_hidden_size != source:
        raise UnsupportedModel(
            f"the projector reads {projector.encoder_hidden_size} elements of each position, but the encoder gives "
            f"{source}"
        )
    window, rate = config.window_size, config.downsample_rate
    if rate < 1 or window < 1 or window % rate:
        raise UnsupportedModel(f"window_size is {window}, not a multiple of downsample_rate, {rate}")
    if projector.num_attention_heads < 1 or projector.hidden_size % projector.num_attention_heads:
        raise UnsupportedModel(
            f"a hidden size of {projector.hidden_size} cannot be split into {projector.num_attention_heads} heads"
        )
    return QueryProjector(
        window=window,
        queries=window // rate,
        source=source,
        hidden=projector.hidden_size,
        layers=projector.num_hidden_layers,
        heads=projector.num_attention_heads,
        ffn=projector.intermediate_size,
        act=projector.hidden_act,
        eps=projector.layer_norm_eps,
        cross_every=projector.cross_attention_frequency,
        size=text.hidden,
    )
