"""Reads the audio config of an audio language model: an AudioInfo."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.client.audio import AudioInfo, AudioLengths, WindowLengths
from quire.engine.models.config.adapter import AdapterConfig, read_adapter
from quire.engine.models.config.sentence_transformers import read_json
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.specs.audio import (
    CausalConvStem,
    ChunkedConvStem,
    Conv2dStem,
    ConvStem,
    LinearStem,
    QueryProjector,
    WaveStem,
)
from quire.engine.models.specs.decoder import AudioEncoderSpec

_RATE = 16_000  # samples per second
# What features are made of; the extractor's config may say so, but nothing else.
_SHARED: dict[str, float] = {"sampling_rate": _RATE, "hop_length": 160, "dither": 0.0}
_LOG_MEL = {**_SHARED, "n_fft": 400}
_LONG_FRAMES = {**_SHARED, "n_fft": 512, "win_length": 400}
_TEXTS = {  # that stand for a piece of audio, if the chat template has none
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "qwen3_asr": "<|audio_start|><|audio_pad|><|audio_end|>",
    "voxtral": "[BEGIN_AUDIO][AUDIO]",
}
# Model types that are trained with an adapter for audio.
ADAPTED = ("granite_speech", "granite_speech_plus", "phi4_multimodal")
_PLACEHOLDER_TEXT = "<|audio|>"  # of other models, if the tokenizer has none for the placeholder
_VOXTRAL_PLACEHOLDER = 24  # what transformers assumes
_CONTEXT = 2  # columns that the two convolutions of a whisper-like stem read behind their last one
_MIN_SAMPLES = 8_000  # of Qwen 3 ASR, unless its extractor's config says otherwise
_FRAME = 400  # samples that a column is made of
Fields = dict[str, Any]


def read_audio(folder: Path, config: Any, encoder: AudioEncoderSpec, vocab: int) -> AudioInfo:
    """Read the config of a model's feature extractor.

    Args:
        folder: the model's directory.
        config: the model's Hugging Face config.
        encoder: architecture of the audio encoder.
        vocab: tokens of its vocabulary.

    Raises:
        BrokenFolder: a file cannot be read, or a number in it cannot be used.
        UnsupportedModel: the feature extractor is not supported, or there is no placeholder token.
    """
    extractor = _extractor(folder)
    kind = config.model_type
    placeholder = _placeholder(config, vocab)
    match encoder.stem:
        case ChunkedConvStem():
            fields = _chunked(extractor, config, encoder.stem)
        case LinearStem():
            fields = _windowed(extractor, config, encoder, encoder.stem)
        case ConvStem():
            fields = _padded(extractor, kind, encoder, encoder.stem)
        case Conv2dStem():
            fields = _kaldi(extractor, encoder, encoder.stem)
        case WaveStem() | CausalConvStem():
            raise UnsupportedModel(f"the audio encoder of {kind} is not supported in language models")
    return AudioInfo(
        placeholder=placeholder,
        sample_rate=_RATE,
        **{"kind": kind, "placeholder_text": _TEXTS.get(kind) or _text_of(folder, placeholder), **fields},
    )


def read_audio_adapter(folder: Path, config: Any) -> AdapterConfig | None:
    """Read the config of the adapter with which a model computes requests with audio; None if it has none.

    Raises:
        ModelError: see `read_adapter`.
    """
    if config.model_type != "phi4_multimodal":
        return read_adapter(folder) if config.model_type in ADAPTED else None
    inside = getattr(config, "speech_lora", None)  # as its authors have published it
    if inside is None:
        return read_adapter(folder, "speech-lora")
    alpha = inside.get("lora_alpha") if isinstance(inside, dict) else None
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise BrokenFolder(f"config.json: speech_lora must be an object with a number lora_alpha, not {inside!r}")
    return AdapterConfig(file=None, name="speech", alpha=float(alpha))


def check_log_mel(folder: Path, rows: int) -> Mapping[str, Any]:
    """Check that a model's features are log-mel spectrograms like Whisper's; returns its feature extractor's config.

    Args:
        folder: the model's directory.
        rows: rows of the features that the encoder reads.

    Raises:
        BrokenFolder: a file cannot be read.
        UnsupportedModel: the feature extractor is not supported.
    """
    extractor = _extractor(folder)
    _check(extractor, {**_LOG_MEL, "feature_size": rows})
    return extractor


def _placeholder(config: Any, vocab: int) -> int:
    found = config.audio_config.audio_token_id if config.model_type == "phi4_multimodal" else config.audio_token_id
    if found is None and config.model_type == "voxtral":
        found = _VOXTRAL_PLACEHOLDER
    if type(found) is not int or not 0 <= found < vocab:
        raise UnsupportedModel(f"audio_token_id is {found!r}, which is not a token of the vocabulary")
    return found


def _chunked(extractor: Mapping[str, Any], config: Any, stem: ChunkedConvStem) -> Fields:
    """The fields of Qwen 3 ASR."""
    _check(extractor, {**_LOG_MEL, "feature_size": stem.rows})
    shortest = max(_FRAME, _count(extractor, "min_length", _MIN_SAMPLES))
    columns = config.audio_config.n_window_infer
    lengths = AudioLengths(stem.chunk, 3, 1)
    return {"num_mel_bins": stem.rows, "item_columns": columns, "lengths": lengths, "min_samples": shortest}


def _padded(extractor: Mapping[str, Any], kind: str, encoder: AudioEncoderSpec, stem: ConvStem) -> Fields:
    """The fields of models with whisper's encoder."""
    _check(extractor, {**_LOG_MEL, "feature_size": stem.channels})
    columns = 2 * encoder.max_positions
    lengths = AudioLengths(columns, 1, encoder.averaged * encoder.joined)
    fields = {"num_mel_bins": stem.channels, "item_columns": columns, "lengths": lengths, "padded_columns": columns}
    return fields | ({"encodes_padding": True} if kind == "voxtral" else {"columns_after": _CONTEXT, "max_items": 1})


def _windowed(extractor: Mapping[str, Any], config: Any, encoder: AudioEncoderSpec, stem: LinearStem) -> Fields:
    """The fields of Granite Speech. Its extractor does not read what its config calls melspec_kwargs."""
    if stem.rows % 2:
        raise UnsupportedModel(f"the encoder reads {stem.rows} rows of features, an odd number")
    assert isinstance(encoder.projector, QueryProjector)
    window, queries = encoder.projector.window, encoder.projector.queries
    fixed = {"projector_window_size": window, "projector_downsample_rate": window // queries}
    _check(extractor, {**_LONG_FRAMES, **fixed, "n_mels": stem.rows // 2, "feature_size": stem.rows // 2})
    return {
        "kind": "granite_speech",
        "features": "stacked_log_mel",
        "num_mel_bins": stem.rows,
        "column_samples": 320,
        "item_columns": encoder.max_positions,
        "lengths": WindowLengths(window, queries),
        "max_items": 1,
    }


def _kaldi(extractor: Mapping[str, Any], encoder: AudioEncoderSpec, stem: Conv2dStem) -> Fields:
    """The fields of Phi-4 Multimodal. Audio longer than a chunk is several items; convolutions read across borders."""
    rate = 1 << stem.layers
    fixed = {"preemphasis": 0.97, "audio_compression_rate": rate, "audio_downsample_rate": 1, "audio_feat_stride": 1}
    bands = {"mel_min_frequency": 0, "mel_max_frequency": 7690, "feature_size": stem.bands}
    _check(extractor, {**_LONG_FRAMES, **fixed, **bands})
    columns = encoder.chunk * rate
    return {
        "features": "kaldi_log_mel",
        "num_mel_bins": stem.bands,
        "item_columns": columns,
        "lengths": AudioLengths(columns, stem.layers, 1),
        "columns_before": rate,
    }


def _check(extractor: Mapping[str, Any], fixed: Mapping[str, float]) -> None:
    """Check what the extractor's config says.

    Raises:
        UnsupportedModel: something else than what is known here or what the encoder reads.
    """
    for name, value in fixed.items():
        if extractor.get(name, value) == value:
            continue
        if name in ("feature_size", "n_mels"):
            raise UnsupportedModel(
                f"the feature extractor makes {extractor[name]!r} rows, but the encoder reads {value}"
            )
        raise UnsupportedModel(f"the feature extractor's {name} is {extractor[name]!r}; supported is {value}")


def _text_of(folder: Path, token: int) -> str:
    """The text of a special token."""
    added = read_json(folder / "tokenizer.json").get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("id") == token and isinstance(entry.get("content"), str):
            return str(entry["content"])
    return _PLACEHOLDER_TEXT


def _extractor(folder: Path) -> Mapping[str, Any]:
    """The config of the feature extractor; recent versions of transformers write it into that of the processor."""
    own = read_json(folder / "preprocessor_config.json")
    processor = read_json(folder / "processor_config.json")
    inside = processor.get("feature_extractor", processor.get("audio_processor"))
    return {**(inside if isinstance(inside, dict) else {}), **own}


def _count(extractor: Mapping[str, Any], name: str, default: int) -> int:
    value = extractor.get(name, default)
    if type(value) is not int or not 0 <= value <= 30 * _RATE:
        raise BrokenFolder(f"the feature extractor's {name} must be a number of samples, not {value!r}")
    return value
