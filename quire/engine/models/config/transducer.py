"""Reads the transcription configs of transducers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.engine.client.streaming import TransducerInfo
from quire.engine.models.config.ctc_moonshine import check_spectrogram, read_preprocessor
from quire.engine.models.config.sentence_transformers import read_json
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.ctc import SAMPLE_RATE
from quire.engine.models.specs.audio import CausalConv2dStem
from quire.engine.models.specs.decoder import TransducerSpec

_MAX_SYMBOLS = 1000


def read_transducer(folder: Path, config: Any, spec: TransducerSpec) -> TransducerInfo:
    """The transcription config of a transducer.

    Args:
        folder: the model's directory.
        config: the model's Hugging Face config.
        spec: its architecture.

    Raises:
        UnsupportedModel: the features, the lookahead or a token are not supported.
    """
    stem = spec.encoder.stem
    assert isinstance(stem, CausalConv2dStem)
    given = read_preprocessor(folder)
    check_spectrogram(given)
    rows = given.get("feature_size", stem.bands)
    if rows != stem.bands:
        raise UnsupportedModel(f"the feature extractor makes {rows!r} rows, but the encoder reads {stem.bands}")
    filters = given.get("mel_filters_dtype", "float32")
    if filters not in ("float32", "bfloat16"):
        raise UnsupportedModel(
            f"the feature extractor's mel_filters_dtype must be float32 or bfloat16, not {filters!r}"
        )
    _check_lookahead(folder, spec.chunk - 1)
    generation = read_json(folder / "generation_config.json")
    start = generation.get("decoder_start_token_id", config.blank_token_id)
    if start != config.blank_token_id:
        raise UnsupportedModel(f"decoder_start_token_id must be the blank, {config.blank_token_id!r}, not {start!r}")
    return TransducerInfo(
        sample_rate=SAMPLE_RATE,
        num_mel_bins=stem.bands,
        columns_per_frame=1 << stem.layers,
        chunk_frames=spec.chunk,
        blank_token=_number("blank_token_id", config.blank_token_id, 0, spec.vocab - 1),
        max_symbols=_number("max_symbols_per_step", config.max_symbols_per_step, 1, _MAX_SYMBOLS),
        bfloat16_filters=filters == "bfloat16",
    )


def _number(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise UnsupportedModel(f"{name} must be an integer from {low} to {high}, not {value!r}")
    return value


def _check_lookahead(folder: Path, frames: int) -> None:
    """Check that the model was trained with a lookahead, if its folder says with which ones."""
    trained = read_json(folder / "processor_config.json").get("supported_num_lookahead_tokens")
    if isinstance(trained, list) and frames not in trained:
        listed = ", ".join(map(str, trained))
        raise UnsupportedModel(
            f"the model was not trained with encoder_config.default_num_lookahead_tokens {frames}; with: {listed}"
        )
