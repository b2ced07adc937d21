"""Models that transcribe audio in pieces with a prediction network over the text so far (RNN-T)."""

from __future__ import annotations

import math
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.specs.audio import CausalConv2dStem, ChunkedAttention, Projector, TimeConv
from quire.engine.models.specs.decoder import AudioEncoderSpec, ConformerLayer, LayerNormSpec, PlainMLP, TransducerSpec

MAX_FRAMES = 1 << 20  # of one request: 23 hours
_MAX_LOOKAHEAD = 1000  # frames
_EPS = 1e-5  # of all norms


def nemotron_asr_streaming(config: Any) -> TransducerSpec:
    """Nemotron Speech Streaming: a causal conformer in chunks (Noroozi et al. 2024), and a transducer.

    Raises:
        UnsupportedModel: the subsampling, the lookahead or the window is not supported.
    """
    encoder = config.encoder_config
    hidden, heads = encoder.hidden_size, encoder.num_attention_heads
    dim = getattr(encoder, "head_dim", None) or hidden // heads
    factor, lookahead = encoder.subsampling_factor, encoder.default_num_lookahead_tokens
    if encoder.subsampling_conv_stride != 2 or type(factor) is not int or factor < 2 or factor & (factor - 1):
        raise UnsupportedModel("subsampling_conv_stride must be 2, and subsampling_factor a power of 2")
    if type(lookahead) is not int or not 0 <= lookahead <= _MAX_LOOKAHEAD:
        raise UnsupportedModel(f"default_num_lookahead_tokens must be from 0 to {_MAX_LOOKAHEAD}, not {lookahead!r}")
    if type(encoder.sliding_window) is not int or encoder.sliding_window < 1:
        raise UnsupportedModel(f"sliding_window must be at least 1, not {encoder.sliding_window!r}")
    chunk = lookahead + 1
    layer = ConformerLayer(
        attn=ChunkedAttention(
            heads=heads,
            head_dim=dim,
            scale=dim**-0.5,
            chunk=chunk,
            past=(encoder.sliding_window - 1) // chunk * chunk,
            bias=encoder.attention_bias,
        ),
        ffn=PlainMLP(size=encoder.intermediate_size, act=encoder.hidden_act, bias=encoder.attention_bias),
        conv=TimeConv(
            size=hidden,
            kernel=encoder.conv_kernel_size,
            act=encoder.hidden_act,
            bias=encoder.convolution_bias,
            kernel_bias=encoder.convolution_bias,
            causal=True,
            norm=_EPS,
        ),
    )
    return TransducerSpec(
        encoder=AudioEncoderSpec(
            stem=CausalConv2dStem(
                bands=encoder.num_mel_bins,
                channels=encoder.subsampling_conv_channels,
                layers=factor.bit_length() - 1,
                kernel=encoder.subsampling_conv_kernel_size,
                scale=math.sqrt(hidden) if encoder.scale_input else 1.0,
            ),
            positions=None,
            hidden=hidden,
            layers=(layer,) * encoder.num_hidden_layers,
            norm=LayerNormSpec(eps=_EPS),
            max_positions=MAX_FRAMES,
            final_norm=False,
            projector=Projector(sizes=(config.decoder_hidden_size,), bias=True),
        ),
        hidden=config.decoder_hidden_size,
        vocab=config.vocab_size,
        lstm_layers=config.num_decoder_layers,
        act=config.hidden_act,
        chunk=chunk,
    )
