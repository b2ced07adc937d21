"""Qwen 3 ASR."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.audio import AudioInfo, AudioLengths
from quire.engine.models.config.feature_extractor import SAMPLE_RATE, check_log_mel
from quire.engine.models.config.placeholder import check_placeholder
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.families.qwen2_audio import TOWER, whisper_layers, with_tower
from quire.engine.models.families.whisper import WHISPER_NORM, encoder_rules
from quire.engine.models.family import Composite, Facts, text_config
from quire.engine.models.specs.audio import ChunkedConvStem, Projector
from quire.engine.models.specs.decoder import AudioEncoderSpec, DecoderSpec
from quire.engine.models.specs.tensor_names import KIND, WeightNames

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

# Features of one chunk of audio that the encoder's convolutions halve three times.
_HALVINGS = 3
_FRAME = 400  # samples that a column is made of
_MIN_SAMPLES = 8_000  # of audio, unless the extractor's config says otherwise
_MAX_SAMPLES = 30 * SAMPLE_RATE
_CHUNKED = (
    (TOWER + r"conv2d(?P<conv>1|2|3)" + KIND, "encoder.stem.conv{conv}.{kind}"),
    (TOWER + r"conv_out\.weight", "encoder.stem.out.weight"),
    (TOWER + r"ln_post" + KIND, "encoder.norm.{kind}"),
)


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
        layers=whisper_layers(audio),
        norm=WHISPER_NORM,
        max_positions=audio.n_window_infer // chunk * positions,
        projector=Projector(sizes=(audio.hidden_size, audio.output_dim), bias=True, act=audio.activation_function),
    )
    return replace(text, tied=bool(config.tie_word_embeddings), encoder=encoder)


def _square_convolution(weight: Tensor) -> Tensor:
    """(outputs, inputs, height, width) as the weight of a linear layer, see `ChunkedConvStemLayer`."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def _names(_spec: DecoderSpec, text: WeightNames) -> WeightNames:
    convert = {f"encoder.stem.conv{index}.weight": _square_convolution for index in (1, 2, 3)}
    return with_tower(text, (*encoder_rules(TOWER), *_CHUNKED), convert={**text.convert, **convert})


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> Facts:
    assert spec.encoder is not None
    stem = spec.encoder.stem
    assert isinstance(stem, ChunkedConvStem)
    shortest = check_log_mel(folder, stem.rows).get("min_length", _MIN_SAMPLES)
    if type(shortest) is not int or not 0 <= shortest <= _MAX_SAMPLES:
        raise BrokenFolder(f"the feature extractor's min_length must be a number of samples, not {shortest!r}")
    audio = AudioInfo(
        kind="qwen3_asr",
        placeholder=check_placeholder(config.audio_token_id, spec.vocab),
        placeholder_text="<|audio_start|><|audio_pad|><|audio_end|>",
        sample_rate=SAMPLE_RATE,
        num_mel_bins=stem.rows,
        item_columns=config.audio_config.n_window_infer,
        lengths=AudioLengths(stem.chunk, _HALVINGS, 1),
        min_samples=max(_FRAME, shortest),
    )
    return Facts(audio=audio)


FAMILIES = (
    Composite(
        name="qwen3_asr",
        config_types=("qwen3_asr",),
        language_model=text_config,
        spec=qwen3_asr,
        tensors=_names,
        facts=_facts,
    ),
)
