"""Parakeet, which transcribes by connectionist temporal classification (CTC)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.engine.client.convolutions import count_positions
from quire.engine.models.config.feature_extractor import (
    HOP,
    SAMPLE_RATE,
    WINDOW_SECONDS,
    check_nemo_spectrogram,
    read_speech_extractor,
)
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.wav2vec2 import ctc_facts
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.audio import Conv2dStem, RelativeAttention, TimeConv
from quire.engine.models.specs.decoder import AudioEncoderSpec, ConformerLayer, CTCSpec, LayerNormSpec, PlainMLP
from quire.engine.models.specs.tensor_names import KIND, WeightNames, linear_weight

_TO = "encoder.layers.{index}."
_ENCODER = r"encoder\.layers\.(?P<index>\d+)\."
CONFORMER = (
    (_ENCODER + r"feed_forward(?P<ffn>1|2)\.linear1" + KIND, _TO + "ffn{ffn}.up.{kind}"),
    (_ENCODER + r"feed_forward(?P<ffn>1|2)\.linear2" + KIND, _TO + "ffn{ffn}.down.{kind}"),
    (_ENCODER + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, _TO + "attn.qkv.{kind}"),
    (_ENCODER + r"self_attn\.o_proj" + KIND, _TO + "attn.out.{kind}"),
    (_ENCODER + r"self_attn\.relative_k_proj\.weight", _TO + "attn.distances.weight"),
    (_ENCODER + r"self_attn\.bias_u", _TO + "attn.content_bias"),
    (_ENCODER + r"self_attn\.bias_v", _TO + "attn.distance_bias"),
    (_ENCODER + r"conv\.pointwise_conv1" + KIND, _TO + "conv.up.{kind}"),
    (_ENCODER + r"conv\.depthwise_conv" + KIND, _TO + "conv.over_time.{kind}"),
    (_ENCODER + r"conv\.norm" + KIND, _TO + "conv.norm.{kind}"),
    (_ENCODER + r"conv\.norm\.running_mean", _TO + "conv.norm.mean"),
    (_ENCODER + r"conv\.norm\.running_var", _TO + "conv.norm.variance"),
    (_ENCODER + r"conv\.pointwise_conv2" + KIND, _TO + "conv.down.{kind}"),
    (_ENCODER + r"norm_feed_forward(?P<ffn>1|2)" + KIND, _TO + "ffn{ffn}_norm.{kind}"),
    (_ENCODER + r"norm_self_att" + KIND, _TO + "attn_norm.{kind}"),
    (_ENCODER + r"norm_conv" + KIND, _TO + "conv_norm.{kind}"),
    (_ENCODER + r"norm_out" + KIND, _TO + "out_norm.{kind}"),
    (r"encoder\.subsampling\.linear" + KIND, "encoder.stem.linear.{kind}"),
    (r"encoder\.subsampling\.layers\.0" + KIND, "encoder.stem.first.{kind}"),
    (r"ctc_head" + KIND, "head.{kind}"),
)


def parakeet(config: Any) -> CTCSpec:
    """Parakeet: a conformer of which eight columns of a spectrogram are one position (Rekesh et al. 2023)."""
    encoder = config.encoder_config
    hidden, heads = encoder.hidden_size, encoder.num_attention_heads
    dim = getattr(encoder, "head_dim", None) or hidden // heads
    halvings = count_halvings(encoder)
    if encoder.subsampling_conv_kernel_size % 2 != 1 or encoder.conv_kernel_size % 2 != 1:
        raise UnsupportedModel("subsampling_conv_kernel_size and conv_kernel_size must be odd")
    stem = Conv2dStem(
        bands=encoder.num_mel_bins,
        channels=encoder.subsampling_conv_channels,
        layers=halvings,
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


def count_halvings(encoder: Any) -> int:
    """How often the convolutions before an encoder halve the number of columns.

    Raises:
        UnsupportedModel: another stride than 2, or a factor that is not a power of 2.
    """
    factor = encoder.subsampling_factor
    if encoder.subsampling_conv_stride != 2 or type(factor) is not int or factor < 2 or factor & (factor - 1):
        raise UnsupportedModel("subsampling_conv_stride must be 2, and subsampling_factor a power of 2")
    return factor.bit_length() - 1


def conformer_weights(encoder: AudioEncoderSpec) -> list[str]:
    """Names of the parameters that convolutions of width 1 are loaded into."""
    layers = range(len(encoder.layers))
    return [f"encoder.layers.{index}.conv.{name}.weight" for index in layers for name in ("up", "down")]


def _names(spec: CTCSpec, _facts: Facts) -> WeightNames:
    return WeightNames(
        (*CONFORMER, *_subsampling(spec.encoder)),
        ignored=r".*\.num_batches_tracked",
        convert=dict.fromkeys([*conformer_weights(spec.encoder), "head.weight"], linear_weight),
    )


def _subsampling(encoder: AudioEncoderSpec) -> Iterator[tuple[str, str]]:
    """The names of a convolution, an activation, then two convolutions and an activation for each further layer."""
    for index in range(len(encoder.stem.convolutions) - 1):
        for name, place in (("channelwise", 2 + 3 * index), ("pointwise", 3 + 3 * index)):
            yield rf"encoder\.subsampling\.layers\.{place}" + KIND, f"encoder.stem.{name}.{index}." + "{kind}"


def _facts(folder: Path, config: Any, spec: CTCSpec) -> Facts:
    stem = spec.encoder.stem
    assert isinstance(stem, Conv2dStem)
    check_nemo_spectrogram(read_speech_extractor(folder))
    return ctc_facts(config, spec, "normalized_log_mel", rows=stem.bands, hop=HOP)


FAMILIES = (
    Family(
        name="parakeet_ctc",
        config_types=("parakeet_ctc",),
        kind="ctc",
        spec=parakeet,
        tensors=_names,
        facts=_facts,
        head="CTC",
    ),
)
