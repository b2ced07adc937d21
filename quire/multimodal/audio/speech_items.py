"""Makes items of audio for models that only transcribe: what the engine sends through their encoder."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.model_info import Transcribes
from quire.engine.client.protocol import FeatureArray, MediaItem
from quire.multimodal.audio.features import log_mel, normalized_log_mel, normalized_samples


def make_item(samples: NDArray[np.float32], info: Transcribes) -> MediaItem:
    """The item of audio. Takes up to some tens of milliseconds.

    Args:
        samples: 1-D at 16 kHz, at least one and at most `info.window_seconds`. Very short audio is padded with silence.
        info: facts about the model.
    """
    features = np.ascontiguousarray(_features(samples, info))
    return MediaItem(hash=hashlib.sha256(features.data).digest(), kind="audio", features=features)


def _features(samples: NDArray[np.float32], info: Transcribes) -> FeatureArray:
    match info.features:
        case "log_mel":
            return log_mel(samples, info.num_mel_bins, info.window_seconds)
        case "normalized_log_mel":
            return normalized_log_mel(samples, info.num_mel_bins)
        case "normalized_samples":
            samples = normalized_samples(samples)
        case "samples":
            samples = samples.astype(np.float32)
    return np.pad(samples, (0, max(0, info.min_columns - len(samples))))[None]
