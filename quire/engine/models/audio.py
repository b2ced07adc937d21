"""Reads how a language model takes audio: an AudioInfo."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.models.audio_spec import ChunkedConvStem, ConvStem
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.sentence_transformers import read_json
from quire.engine.models.spec import AudioEncoderSpec
from quire.engine.wire.audio import AudioInfo, AudioLengths

# What features are made of; the extractor's config may say so, but nothing else.
_RATE = 16_000  # samples per second
_FIXED: dict[str, float] = {"sampling_rate": _RATE, "hop_length": 160, "n_fft": 400, "dither": 0.0}
_TEXTS = {  # of a piece of audio, where a chat template has none of its own
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "qwen3_asr": "<|audio_start|><|audio_pad|><|audio_end|>",
    "voxtral": "[BEGIN_AUDIO][AUDIO]",
}
_VOXTRAL_PLACEHOLDER = 24  # what transformers assumes
_CONTEXT = 2  # columns that the two convolutions of a whisper-like stem read behind their last one
_MIN_SAMPLES = 8_000  # of Qwen 3 ASR, unless its extractor's config says otherwise
_FRAME = 400  # samples that a column is made of


def read_audio(folder: Path, config: Any, encoder: AudioEncoderSpec, vocab: int) -> AudioInfo:
    """Read the config of a model's feature extractor.

    Args:
        folder: of the model.
        config: its Hugging Face config.
        encoder: of its audio.
        vocab: tokens of its vocabulary.

    Raises:
        BrokenFolder: a file cannot be read, or a number in it cannot be used.
        UnsupportedModel: features are made in another way than the one that is known here, or there is no placeholder.
    """
    stem = encoder.stem
    rows = stem.rows if isinstance(stem, ChunkedConvStem) else config.audio_config.num_mel_bins
    extractor = check_features(folder, rows)
    kind = config.model_type
    placeholder = config.audio_token_id
    if placeholder is None and kind == "voxtral":
        placeholder = _VOXTRAL_PLACEHOLDER
    if type(placeholder) is not int or not 0 <= placeholder < vocab:
        raise UnsupportedModel(f"audio_token_id is {placeholder!r}, which is not a token of the vocabulary")
    shared: dict[str, Any] = {"kind": kind, "placeholder": placeholder, "text": _TEXTS[kind], "sample_rate": _RATE}
    if isinstance(stem, ChunkedConvStem):
        columns = config.audio_config.n_window_infer
        shortest = max(_FRAME, _count(extractor, "min_length", _MIN_SAMPLES))
        fields: dict[str, Any] = {"lengths": AudioLengths(stem.chunk, 3, 1), "min_samples": shortest}
    else:
        assert isinstance(stem, ConvStem)
        columns, pool = 2 * encoder.max_positions, encoder.averaged * encoder.joined
        fields = {"lengths": AudioLengths(columns, 1, pool), "padded_columns": columns}
        if kind == "voxtral":
            fields |= {"encodes_padding": True}
        else:
            fields |= {"context": _CONTEXT, "max_items": 1}
    return AudioInfo(num_mel_bins=rows, item_columns=columns, **shared, **fields)


def check_features(folder: Path, rows: int) -> Mapping[str, Any]:
    """The config of a model's feature extractor, which makes the features that are known here.

    Args:
        folder: of the model.
        rows: of the features that the encoder reads.

    Raises:
        BrokenFolder: a file cannot be read.
        UnsupportedModel: features are made in another way.
    """
    extractor = _extractor(folder)
    for name, value in _FIXED.items():
        if extractor.get(name, value) != value:
            raise UnsupportedModel(f"the feature extractor's {name} is {extractor[name]!r}; supported is {value}")
    if extractor.get("feature_size", rows) != rows:
        raise UnsupportedModel(
            f"the feature extractor makes {extractor['feature_size']!r} rows, but the encoder reads {rows}"
        )
    return extractor


def _extractor(folder: Path) -> Mapping[str, Any]:
    """The config of the feature extractor; recent versions of transformers write it into that of the processor."""
    own = read_json(folder / "preprocessor_config.json")
    inside = read_json(folder / "processor_config.json").get("feature_extractor")
    return {**(inside if isinstance(inside, dict) else {}), **own}


def _count(extractor: Mapping[str, Any], name: str, default: int) -> int:
    value = extractor.get(name, default)
    if type(value) is not int or not 0 <= value <= 30 * _RATE:
        raise BrokenFolder(f"the feature extractor's {name} must be a number of samples, not {value!r}")
    return value
