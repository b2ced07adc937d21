"""Reads the transcription configs of CTC models and Moonshine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.client.model_info import Transcribes
from quire.engine.models.config.sentence_transformers import read_json
from quire.engine.models.config.speech_to_text import SpeechToTextSpec
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.ctc import HOP, SAMPLE_RATE, WINDOW_SECONDS
from quire.engine.models.specs.audio import Conv2dStem
from quire.engine.models.specs.decoder import CTCSpec, DecoderSpec

# What a spectrogram is made with; other values are refused.
_SPECTROGRAM = {"hop_length": HOP, "n_fft": 512, "win_length": 400, "preemphasis": 0.97}


def read_ctc(folder: Path, config: Any, spec: CTCSpec) -> SpeechToTextSpec:
    """The transcription config of a CTC model.

    Raises:
        UnsupportedModel: its input features are not supported, or it has no blank token.
    """
    given = read_preprocessor(folder)
    stem, encoder = spec.encoder.stem, spec.encoder
    stride = math.prod(one.stride for one in stem.convolutions)
    blank = config.pad_token_id
    if type(blank) is not int or not 0 <= blank < spec.vocab:
        raise UnsupportedModel(f"pad_token_id, the blank of CTC, is {blank!r}, which is not a token of the vocabulary")
    banded = isinstance(stem, Conv2dStem)
    if banded:
        check_spectrogram(given)
    normalized = given.get("do_normalize", True) is not False
    info = Transcribes(
        kind="ctc",
        features="normalized_log_mel" if banded else "normalized_samples" if normalized else "samples",
        sample_rate=SAMPLE_RATE,
        num_mel_bins=stem.bands if isinstance(stem, Conv2dStem) else 1,
        num_columns=round(WINDOW_SECONDS * SAMPLE_RATE) // (HOP if banded else 1),
        convolutions=stem.convolutions,
        window_seconds=WINDOW_SECONDS,
        num_positions=encoder.max_positions,
        max_output_tokens=encoder.max_positions,
        blank_token=blank,
        aligns_words=True,
        time_precision=stride * (HOP if banded else 1) / SAMPLE_RATE,
    )
    return SpeechToTextSpec(info=info)


def read_moonshine(folder: Path, config: Any, spec: DecoderSpec) -> SpeechToTextSpec:
    """The transcription config of Moonshine.

    Raises:
        UnsupportedModel: its input features are not supported, or it lacks a token.
    """
    encoder = spec.encoder
    assert encoder is not None
    generation = read_json(folder / "generation_config.json")

    def token(key: str) -> int:
        found: Any = generation.get(key, getattr(config, key))
        if type(found) is not int or not 0 <= found < spec.vocab:
            raise UnsupportedModel(f"{key} is {found!r}, which is not a token of the vocabulary")
        return found

    normalized = read_preprocessor(folder).get("do_normalize", False) is True
    info = Transcribes(
        kind="moonshine",
        features="normalized_samples" if normalized else "samples",
        sample_rate=SAMPLE_RATE,
        num_mel_bins=1,
        num_columns=round(WINDOW_SECONDS * SAMPLE_RATE),
        convolutions=encoder.stem.convolutions,
        window_seconds=WINDOW_SECONDS,
        num_positions=encoder.max_positions,
        max_output_tokens=spec.max_positions,
        start_token=token("decoder_start_token_id"),
        end_token=token("eos_token_id"),
        aligns_words=False,
    )
    return SpeechToTextSpec(info=info)


def read_preprocessor(folder: Path) -> Mapping[str, Any]:
    """How audio is prepared, from the file of old or new versions of transformers.

    Raises:
        UnsupportedModel: it has another sample rate.
    """
    given = read_json(folder / "preprocessor_config.json")
    if not given:
        inner = read_json(folder / "processor_config.json").get("feature_extractor")
        given = inner if isinstance(inner, dict) else {}
    rate = given.get("sampling_rate", SAMPLE_RATE)
    if rate != SAMPLE_RATE:
        raise UnsupportedModel(f"the model reads audio at {rate!r} Hz; supported is {SAMPLE_RATE} Hz")
    return given


def check_spectrogram(given: Mapping[str, Any]) -> None:
    """Check how a spectrogram is made. `given`: the result of `read_preprocessor`.

    Raises:
        UnsupportedModel: not as NeMo makes it.
    """
    for name, value in _SPECTROGRAM.items():
        if given.get(name, value) != value:
            raise UnsupportedModel(f"preprocessor_config.json: {name} must be {value}, not {given[name]!r}")
