"""Features of audio that arrives in pieces, for models that read a frame of audio with each token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.engine.wire.protocol import FeatureArray
from quire.engine.wire.streaming import StreamingInfo
from quire.multimodal.audio.features import HOP, REACH, log_mel_columns

Samples = NDArray[np.float32]


def frame_samples(info: StreamingInfo) -> int:
    """Number of samples of a frame."""
    return info.columns_per_frame * HOP


class FrameMaker:
    """Computes features of audio that arrives in pieces: the same as transformers' extractor gives for all of it.

    Silence precedes the audio and follows it. A column of features is centered at every `HOP` samples.
    """

    def __init__(self, info: StreamingInfo) -> None:
        self._info = info
        self._rest = np.zeros(REACH + info.left_frames * frame_samples(info), np.float32)
        self._received = 0

    @property
    def frames(self) -> int:
        """Number of frames with audio so far."""
        return -(-self._received // frame_samples(self._info))

    def push(self, samples: Samples) -> FeatureArray:
        """Add samples, 1-D at 16 kHz; returns the features (rows, columns) of the frames that are complete.

        There may be none. The last features of a frame need 12.5 ms of audio after it.
        """
        self._received += len(samples)
        return self._features(samples)

    def finish(self) -> FeatureArray:
        """The features of the remaining frames, with the silence after the audio."""
        size = frame_samples(self._info)
        silence = -self._received % size + self._info.right_frames * size
        return self._features(np.zeros(silence + REACH, np.float32))

    def _features(self, samples: Samples) -> FeatureArray:
        info, held = self._info, np.concatenate((self._rest, samples))
        columns = max(0, (len(held) - 2 * REACH) // HOP + 1) // info.columns_per_frame * info.columns_per_frame
        self._rest = held[columns * HOP :]
        if not columns:
            return np.empty((info.num_mel_bins, 0), np.float32)
        logs = log_mel_columns(held[: (columns - 1) * HOP + 2 * REACH].astype(np.float64), info.num_mel_bins)
        features: FeatureArray = ((np.maximum(logs, info.floor) + 4.0) / 4.0).astype(np.float32)
        return features


def frames_of(samples: Samples, info: StreamingInfo) -> FeatureArray:
    """The features of audio (1-D at 16 kHz), with the silence around it. Takes milliseconds per second of audio."""
    maker = FrameMaker(info)
    return np.concatenate((maker.push(samples), maker.finish()), 1)
