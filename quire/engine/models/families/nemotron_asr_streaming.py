"""Nemotron Speech Streaming, which transcribes audio in pieces, with a prediction network over the text (RNN-T)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from quire.engine.client.json_file import read_json
from quire.engine.client.streaming import TransducerInfo
from quire.engine.models.config.feature_extractor import SAMPLE_RATE, check_nemo_spectrogram, read_speech_extractor
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.families.parakeet import CONFORMER, conformer_weights, count_halvings
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.audio import CausalConv2dStem, ChunkedAttention, Projector, TimeConv
from quire.engine.models.specs.decoder import AudioEncoderSpec, ConformerLayer, LayerNormSpec, PlainMLP, TransducerSpec
from quire.engine.models.specs.tensor_names import KIND, WeightNames, linear_weight

MAX_FRAMES = 1 << 20  # of one request: 23 hours
_MAX_LOOKAHEAD = 1000  # frames
_EPS = 1e-5  # of all norms
_MAX_SYMBOLS = 1000
_STEM = r"encoder\.subsampling\."
_LSTM = r"decoder\.lstm\.(?P<kind>weight|bias)"
_RULES = (
    *CONFORMER,
    (_STEM + r"conv_in" + KIND, "encoder.stem.first.{kind}"),
    (_STEM + r"layers\.(?P<conv>\d+)\.depthwise_conv" + KIND, "encoder.stem.channelwise.{conv}.{kind}"),
    (_STEM + r"layers\.(?P<conv>\d+)\.pointwise_conv" + KIND, "encoder.stem.pointwise.{conv}.{kind}"),
    (r"encoder_projector" + KIND, "encoder.projector.linears.0.{kind}"),
    (r"decoder\.embedding\.weight", "embedding.weight"),
    (_LSTM + r"_ih_l(?P<index>\d+)", "lstm.inputs.{index}.{kind}"),
    (_LSTM + r"_hh_l(?P<index>\d+)", "lstm.states.{index}.{kind}"),
    (r"decoder\.decoder_projector" + KIND, "predicted.{kind}"),
    (r"joint\.head" + KIND, "head.{kind}"),
)


def nemotron_asr_streaming(config: Any) -> TransducerSpec:
    """Nemotron Speech Streaming: a causal conformer in chunks (Noroozi et al. 2024), and a transducer.

    Raises:
        UnsupportedModel: the subsampling, the lookahead or the window is not supported.
    """
    encoder = config.encoder_config
    hidden, heads = encoder.hidden_size, encoder.num_attention_heads
    dim = getattr(encoder, "head_dim", None) or hidden // heads
    halvings, lookahead = count_halvings(encoder), encoder.default_num_lookahead_tokens
    if type(lookahead) is not int or not 0 <= lookahead <= _MAX_LOOKAHEAD:
        raise UnsupportedModel(f"default_num_lookahead_tokens must be from 0 to {_MAX_LOOKAHEAD}, not {lookahead!r}")
    kernel = encoder.subsampling_conv_kernel_size
    if type(kernel) is not int or kernel < 2:  # of one column none would be read again
        raise UnsupportedModel(f"subsampling_conv_kernel_size must be at least 2, not {kernel!r}")
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
                layers=halvings,
                kernel=kernel,
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


def _names(spec: TransducerSpec, _facts: Facts) -> WeightNames:
    return WeightNames(_RULES, convert=dict.fromkeys(conformer_weights(spec.encoder), linear_weight))


def _facts(folder: Path, config: Any, spec: TransducerSpec) -> Facts:
    stem = spec.encoder.stem
    assert isinstance(stem, CausalConv2dStem)
    extractor = read_speech_extractor(folder)
    check_nemo_spectrogram(extractor)
    rows = extractor.get("feature_size", stem.bands)
    if rows != stem.bands:
        raise UnsupportedModel(f"the feature extractor makes {rows!r} rows, but the encoder reads {stem.bands}")
    filters = extractor.get("mel_filters_dtype", "float32")
    if filters not in ("float32", "bfloat16"):
        raise UnsupportedModel(
            f"the feature extractor's mel_filters_dtype must be float32 or bfloat16, not {filters!r}"
        )
    _check_lookahead(folder, spec.chunk - 1)
    generation = read_json(folder / "generation_config.json", BrokenFolder)
    start = generation.get("decoder_start_token_id", config.blank_token_id)
    if start != config.blank_token_id:
        raise UnsupportedModel(f"decoder_start_token_id must be the blank, {config.blank_token_id!r}, not {start!r}")
    info = TransducerInfo(
        sample_rate=SAMPLE_RATE,
        num_mel_bins=stem.bands,
        columns_per_frame=1 << stem.layers,
        chunk_frames=spec.chunk,
        blank_token=_number("blank_token_id", config.blank_token_id, 0, spec.vocab - 1),
        max_symbols=_number("max_symbols_per_step", config.max_symbols_per_step, 1, _MAX_SYMBOLS),
        bfloat16_filters=filters == "bfloat16",
    )
    return Facts(streaming=info)


def _number(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise UnsupportedModel(f"{name} must be an integer from {low} to {high}, not {value!r}")
    return value


def _check_lookahead(folder: Path, frames: int) -> None:
    """Check that the model was trained with a lookahead, if its folder says with which ones."""
    trained = read_json(folder / "processor_config.json", BrokenFolder).get("supported_num_lookahead_tokens")
    if isinstance(trained, list) and frames not in trained:
        listed = ", ".join(map(str, trained))
        raise UnsupportedModel(
            f"the model was not trained with encoder_config.default_num_lookahead_tokens {frames}; with: {listed}"
        )


FAMILIES = (
    Family(
        name="nemotron_asr_streaming",
        config_types=("nemotron_asr_streaming",),
        kind="transducer",
        spec=nemotron_asr_streaming,
        tensors=_names,
        facts=_facts,
        head="RNNT",
    ),
)
