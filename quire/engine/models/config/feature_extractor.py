"""Reads how a model's features are made of audio: the config of its feature extractor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.client.json_file import read_json
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

SAMPLE_RATE = 16_000  # samples per second
HOP = 160  # samples from one column of a spectrogram to the next
WINDOW_SECONDS = 30.0  # of audio that an encoder of whole windows reads at once
# What features are made of; the extractor's config may say so, but nothing else.
_SHARED: dict[str, float] = {"sampling_rate": SAMPLE_RATE, "hop_length": HOP, "dither": 0.0}
LOG_MEL = {**_SHARED, "n_fft": 400}  # Whisper's
LONG_FRAMES = {**_SHARED, "n_fft": 512, "win_length": 400}
_NEMO = {"hop_length": HOP, "n_fft": 512, "win_length": 400, "preemphasis": 0.97}
Extractor = Mapping[str, Any]


def read_extractor(folder: Path) -> Extractor:
    """The config of the feature extractor; recent versions of transformers write it into that of the processor.

    Raises:
        BrokenFolder: a file cannot be read.
    """
    preprocessor = read_json(folder / "preprocessor_config.json", BrokenFolder)
    processor = read_json(folder / "processor_config.json", BrokenFolder)
    inside = processor.get("feature_extractor", processor.get("audio_processor"))
    return {**(inside if isinstance(inside, dict) else {}), **preprocessor}


def check_extractor(extractor: Extractor, fixed: Mapping[str, float]) -> None:
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


def check_log_mel(folder: Path, rows: int) -> Extractor:
    """Check that a model's features are log-mel spectrograms like Whisper's; returns its feature extractor's config.

    Args:
        folder: the model's directory.
        rows: rows of the features that the encoder reads.

    Raises:
        BrokenFolder: a file cannot be read.
        UnsupportedModel: the feature extractor is not supported.
    """
    extractor = read_extractor(folder)
    check_extractor(extractor, {**LOG_MEL, "feature_size": rows})
    return extractor


def read_speech_extractor(folder: Path) -> Extractor:
    """The config of the feature extractor of a model that only transcribes.

    Raises:
        UnsupportedModel: it has another sample rate.
    """
    extractor = read_extractor(folder)
    rate = extractor.get("sampling_rate", SAMPLE_RATE)
    if rate != SAMPLE_RATE:
        raise UnsupportedModel(f"the model reads audio at {rate!r} Hz; supported is {SAMPLE_RATE} Hz")
    return extractor


def check_nemo_spectrogram(extractor: Extractor) -> None:
    """Check how a spectrogram is made.

    Raises:
        UnsupportedModel: not as NeMo makes it.
    """
    for name, value in _NEMO.items():
        if extractor.get(name, value) != value:
            raise UnsupportedModel(f"preprocessor_config.json: {name} must be {value}, not {extractor[name]!r}")
