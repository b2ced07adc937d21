"""Models whose encoder gives the text itself, by connectionist temporal classification (CTC)."""

from __future__ import annotations

import math
from typing import Any

from quire.engine.client.convolutions import count_positions
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.specs.audio import (
    Conv2dStem,
    ConvPositions,
    RelativeAttention,
    StemNorm,
    TimeConv,
    WaveConv,
    WaveStem,
)
from quire.engine.models.specs.decoder import (
    AudioEncoderSpec,
    ConformerLayer,
    CTCSpec,
    GroupedQueryAttention,
    Layer,
    LayerNormSpec,
    PlainMLP,
)

WINDOW_SECONDS = 30.0  # of audio that is encoded at once
SAMPLE_RATE = 16_000  # samples per second
HOP = 160  # samples for each column of a spectrogram


def wav2vec2(config: Any) -> CTCSpec:
    """wav2vec 2.0: convolutions over samples, a convolution for positions, norms after the sums or before the branches.

    Raises:
        UnsupportedModel: it has an adapter.
    """
    if getattr(config, "add_adapter", False):
        raise UnsupportedModel("wav2vec2 with add_adapter is not supported")
    if getattr(config, "adapter_attn_dim", None) is not None:
        raise UnsupportedModel("wav2vec2 with an adapter for each language (adapter_attn_dim) is not supported")
    return _wave_model(config, projection_norm=True)


def hubert(config: Any) -> CTCSpec:
    """HuBERT: wav2vec 2.0, perhaps without the norm before the projection.

    Raises:
        UnsupportedModel: positions have a batch norm.
    """
    if config.conv_pos_batch_norm:
        raise UnsupportedModel("hubert with conv_pos_batch_norm is not supported")
    return _wave_model(config, projection_norm=config.feat_proj_layer_norm)


def parakeet(config: Any) -> CTCSpec:
    """Parakeet: a conformer of which eight columns of a spectrogram are one position (Rekesh et al. 2023)."""
    encoder = config.encoder_config
    hidden, heads = encoder.hidden_size, encoder.num_attention_heads
    dim = getattr(encoder, "head_dim", None) or hidden // heads
    factor = encoder.subsampling_factor
    if encoder.subsampling_conv_stride != 2 or type(factor) is not int or factor < 2 or factor & (factor - 1):
        raise UnsupportedModel("subsampling_conv_stride must be 2, and subsampling_factor a power of 2")
    if encoder.subsampling_conv_kernel_size % 2 != 1 or encoder.conv_kernel_size % 2 != 1:
        raise UnsupportedModel("subsampling_conv_kernel_size and conv_kernel_size must be odd")
    stem = Conv2dStem(
        bands=encoder.num_mel_bins,
        channels=encoder.subsampling_conv_channels,
        layers=factor.bit_length() - 1,
        kernel=encoder.subsampling_conv_kernel_size,
        scale=math.sqrt(hidden) if encoder.scale_input else 1.0,
    )
    layer = ConformerLayer(
        attn=RelativeAttention(heads=heads, head_dim=dim, scale=dim**-0.5, bias=encoder.attention_bias),
        ffn=PlainMLP(size=encoder.intermediate_size, act=encoder.hidden_act, bias=encoder.attention_bias),
        conv=TimeConv(
            size=hidden,
            kernel=encoder.conv_kernel_size,
            act=encoder.hidden_act,
            bias=encoder.convolution_bias,
            kernel_bias=encoder.convolution_bias,
        ),
    )
    columns = round(WINDOW_SECONDS * SAMPLE_RATE / HOP)
    return CTCSpec(
        encoder=AudioEncoderSpec(
            stem=stem,
            positions=None,
            hidden=hidden,
            layers=(layer,) * encoder.num_hidden_layers,
            norm=LayerNormSpec(eps=1e-5),
            max_positions=count_positions(stem.convolutions, columns),
            final_norm=False,
        ),
        vocab=config.vocab_size,
    )


def _wave_model(config: Any, *, projection_norm: bool) -> CTCSpec:
    hidden, heads, stable = config.hidden_size, config.num_attention_heads, config.do_stable_layer_norm
    dim = hidden // heads
    if dim * heads != hidden or hidden % config.num_conv_pos_embedding_groups:
        groups = config.num_conv_pos_embedding_groups
        raise UnsupportedModel(f"a hidden size of {hidden} cannot be split into {heads} heads and {groups} groups")
    layer = Layer(
        attn=GroupedQueryAttention(
            heads=heads, kv_heads=heads, head_dim=dim, scale=dim**-0.5, rope=None, qkv_bias=True, out_bias=True
        ),
        ffn=PlainMLP(size=config.intermediate_size, act=config.hidden_act),
        pre_norm=stable,
        post_ln=not stable,
    )
    stem = WaveStem(
        convs=_convs(config), projection=True, projection_norm=config.layer_norm_eps if projection_norm else None
    )
    positions = ConvPositions(
        kernel=config.num_conv_pos_embeddings,
        groups=config.num_conv_pos_embedding_groups,
        act=config.feat_extract_activation,
        norm=not stable,
    )
    return CTCSpec(
        encoder=AudioEncoderSpec(
            stem=stem,
            positions=positions,
            hidden=hidden,
            layers=(layer,) * config.num_hidden_layers,
            norm=LayerNormSpec(eps=config.layer_norm_eps),
            max_positions=count_positions(stem.convolutions, round(WINDOW_SECONDS * SAMPLE_RATE)),
            final_norm=stable,
        ),
        vocab=config.vocab_size,
    )


def _convs(config: Any) -> tuple[WaveConv, ...]:
    if config.feat_extract_norm not in ("group", "layer"):
        raise UnsupportedModel(f"feat_extract_norm must be group or layer, not {config.feat_extract_norm!r}")
    for name in ("conv_dim", "conv_kernel", "conv_stride"):
        if not all(type(value) is int and value > 0 for value in getattr(config, name)):
            raise UnsupportedModel(f"{name} must be a list of positive integers")
    by_position = config.feat_extract_norm == "layer"
    sizes = zip(config.conv_dim, config.conv_kernel, config.conv_stride, strict=True)
    return tuple(
        WaveConv(
            size=size,
            kernel=kernel,
            stride=stride,
            act=config.feat_extract_activation,
            bias=config.conv_bias,
            norm=StemNorm.POSITION if by_position else StemNorm.CHANNEL if index == 0 else None,
        )
        for index, (size, kernel, stride) in enumerate(sizes)
    )
