"""Features are those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    ParakeetFeatureExtractor,
    Phi4MultimodalFeatureExtractor,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
)

from quire.engine.client.convolutions import Convolution, count_columns, count_positions
from quire.engine.client.model_info import Transcribes
from quire.multimodal.audio.features import (
    SAMPLE_RATE,
    kaldi_columns,
    kaldi_log_mel,
    log_mel,
    normalized_log_mel,
    normalized_samples,
    stacked_columns,
    stacked_log_mel,
)
from quire.multimodal.audio.items import make_item
from tests.support.audio import Samples, tone
from tests.support.audio_models import stacked_features

SECONDS = 30


def noise(length: int) -> Samples:
    """Noise that swells, so that its frames have different levels."""
    random = np.random.default_rng(7)
    return (random.standard_normal(length) * np.linspace(1e-4, 0.3, max(1, length))).astype(np.float32)


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("length", [1, 200, 16_000, 35_777, SECONDS * SAMPLE_RATE - 1, SECONDS * SAMPLE_RATE])
def test_features_equal_those_of_transformers(bins: int, length: int) -> None:
    extractor = WhisperFeatureExtractor(feature_size=bins)
    samples = noise(length)
    features = log_mel(samples, bins)
    assert features.shape == (bins, 3000)
    assert features.dtype == np.float32
    padded = np.pad(samples, (0, SECONDS * SAMPLE_RATE - length))
    exact = extractor._np_extract_fbank_features(padded[None], "cpu")[0]
    np.testing.assert_allclose(features, exact, atol=1e-5)
    through_torch = extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="np").input_features[0]
    np.testing.assert_allclose(features, through_torch, atol=2e-4)  # torch computes in float32


def test_what_is_longer_is_cut_off_and_other_lengths_are_padded_to() -> None:
    long = tone(4.0)[:, 0]
    np.testing.assert_array_equal(log_mel(long, 80, 2.0), log_mel(long[: 2 * SAMPLE_RATE], 80, 2.0))
    assert log_mel(long, 80, 5.0).shape == (80, 500)


def test_silence_has_finite_features() -> None:
    assert np.ptp(log_mel(np.zeros(1000, np.float32), 80)) == 0
    assert np.isfinite(log_mel(np.zeros(0, np.float32), 80)).all()


@pytest.mark.parametrize("bins", [16, 80])
@pytest.mark.parametrize("length", [320, 479, 480, 16_000, 35_777])
def test_normalized_spectrograms_equal_those_of_transformers(bins: int, length: int) -> None:
    extractor = ParakeetFeatureExtractor(feature_size=bins)
    samples = noise(length) + tone(3.0, hertz=700.0)[:length, 0]
    features = normalized_log_mel(samples, bins)
    assert features.shape == (bins, length // 160)
    assert features.dtype == np.float32
    expected = extractor(samples, sampling_rate=SAMPLE_RATE)
    exact = expected["input_features"][0][: int(expected["attention_mask"].sum())].numpy().T
    np.testing.assert_allclose(features, exact, atol=2e-3)


@pytest.mark.parametrize("length", [257, 480, 640, 16_000, 35_777])
def test_stacked_spectrograms_equal_those_of_torch(length: int) -> None:
    """As transformers' extractor makes them, with torchaudio. Nothing is normalized by what does not fill a column."""
    samples = noise(length)
    features = stacked_log_mel(samples, 8)
    assert features.shape == (16, stacked_columns(length)) == (16, (length // 160 + 1) // 2)
    np.testing.assert_allclose(features, stacked_features(samples)[0].numpy().T, atol=2e-5)
    assert stacked_columns(256) == 0


@pytest.mark.parametrize("length", [400, 559, 560, 16_000, 195_777])
def test_kaldi_spectrograms_equal_those_of_transformers(length: int) -> None:
    samples = noise(length)
    features = kaldi_log_mel(samples, 80)
    assert features.shape == (80, kaldi_columns(length))
    expected = Phi4MultimodalFeatureExtractor()(samples, sampling_rate=SAMPLE_RATE)["audio_input_features"][0]
    np.testing.assert_allclose(features, expected.numpy().T, atol=5e-4)
    assert kaldi_columns(399) == 0


@pytest.mark.parametrize("length", [1, 400, 35_777])
def test_normalized_samples_equal_those_of_transformers(length: int) -> None:
    samples = noise(length) + 0.25
    expected = Wav2Vec2FeatureExtractor()(samples, sampling_rate=SAMPLE_RATE, return_tensors="np").input_values[0]
    np.testing.assert_allclose(normalized_samples(samples), expected, atol=2e-4)


@pytest.mark.parametrize("kind", ["normalized_log_mel", "normalized_samples", "samples"])
@pytest.mark.parametrize("length", [1, 399, 16_000])
def test_items_of_any_length_are_finite_and_long_enough(kind: Any, length: int) -> None:
    """Silence, and audio that is shorter than what a position reads."""
    info = Transcribes(
        kind="ctc",
        features=kind,
        sample_rate=SAMPLE_RATE,
        num_mel_bins=16 if kind == "normalized_log_mel" else 1,
        num_columns=480_000,
        convolutions=(Convolution(3, 2, 1),) if kind == "normalized_log_mel" else (Convolution(400, 320),),
        window_seconds=30.0,
        num_positions=1499,
        max_output_tokens=1499,
        aligns_words=True,
    )
    for samples in (np.zeros(length, np.float32), noise(length)):
        item = make_item(samples, info)
        assert info.positions(item.features.shape[1]) >= 1
        assert np.isfinite(item.features).all()
        assert item.hash == make_item(samples.copy(), info).hash


@pytest.mark.parametrize("convolutions", [((10, 5), (3, 2), (3, 2), (2, 2)), ((127, 64), (7, 3), (3, 2)), ((3, 2, 1),)])
def test_positions_are_counted_as_by_torch(convolutions: tuple[tuple[int, ...], ...]) -> None:
    known = tuple(Convolution(*convolution) for convolution in convolutions)
    layers = [
        torch.nn.Conv1d(1, 1, convolution.kernel, convolution.stride, convolution.padding) for convolution in known
    ]
    fewest = count_columns(known, 1)
    assert count_positions(known, fewest - 1) == 0
    for columns in range(fewest, fewest + 300, 7):
        x = torch.zeros(1, 1, columns)
        for layer in layers:
            x = layer(x)
        assert count_positions(known, columns) == x.shape[2]
