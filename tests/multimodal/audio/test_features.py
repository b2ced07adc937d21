"""Log-mel features are those of transformers."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from quire.multimodal.audio.features import SAMPLE_RATE, log_mel
from tests.support.audio import Samples, tone

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
