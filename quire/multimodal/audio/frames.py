"""Features of audio that arrives in pieces, for models that transcribe it meanwhile."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from quire.engine.client.protocol import FeatureArray
from quire.engine.client.streaming import DelayedStreamsInfo, Streams, TransducerInfo
from quire.multimodal.audio.features import HOP, REACH, log_mel_columns, nemo_log_mel_columns, preemphasized

Samples = NDArray[np.float32]


def frame_samples(info: Streams) -> int:
    """Number of samples of a frame."""
    return info.columns_per_frame * HOP


class FeatureMaker(Protocol):
    """Compute features of audio that arrives in pieces: the same as transformers' extractor gives for all of it."""

    @property
    def frames(self) -> int:
        """Number of frames with audio so far."""

    def push(self, samples: Samples) -> FeatureArray:
        """Add samples, 1-D at 16 kHz; returns the features (rows, columns) that are complete. There may be none.

        A column of features is centered at every `HOP` samples, and needs 12.5 ms of audio after its center.
        """

    def finish(self) -> FeatureArray:
        """The remaining features. There may be none."""


class FrameMaker(FeatureMaker):
    """Features of whole frames, of which each token reads one. Silence precedes the audio and follows it."""

    def __init__(self, info: DelayedStreamsInfo) -> None:
        self._info = info
        self._pending = np.zeros(REACH + info.left_frames * frame_samples(info), np.float32)
        self._received = 0

    @property
    @override
    def frames(self) -> int:
        return -(-self._received // frame_samples(self._info))

    @override
    def push(self, samples: Samples) -> FeatureArray:
        self._received += len(samples)
        return self._features(samples)

    @override
    def finish(self) -> FeatureArray:
        """The features of the remaining frames, with the silence after the audio."""
        size = frame_samples(self._info)
        silence = -self._received % size + self._info.right_frames * size
        return self._features(np.zeros(silence + REACH, np.float32))

    def _features(self, samples: Samples) -> FeatureArray:
        info = self._info
        held = np.concatenate((self._pending, samples))
        columns = max(0, (len(held) - 2 * REACH) // HOP + 1) // info.columns_per_frame * info.columns_per_frame
        self._pending = held[columns * HOP :]
        if not columns:
            return np.empty((info.num_mel_bins, 0), np.float32)
        logs = log_mel_columns(held[: (columns - 1) * HOP + 2 * REACH].astype(np.float64), info.num_mel_bins)
        features: FeatureArray = ((np.maximum(logs, info.floor) + 4.0) / 4.0).astype(np.float32)
        return features


class ColumnMaker(FeatureMaker):
    """Features of a transducer, which are not normalized. Audio of L samples has L // HOP columns, but at least one."""

    def __init__(self, info: TransducerInfo) -> None:
        self._info = info
        self._pending = np.zeros(REACH)  # with preemphasis, from where the next column begins
        self._last = 0.0  # sample
        self._received = 0
        self._columns = 0

    @property
    @override
    def frames(self) -> int:
        return -(-self._received // frame_samples(self._info))

    @override
    def push(self, samples: Samples) -> FeatureArray:
        if not len(samples):
            return self._features(0)
        wide = samples.astype(np.float64)
        self._pending = np.concatenate((self._pending, preemphasized(wide, self._last)))
        self._last = float(wide[-1])
        self._received += len(samples)
        return self._features(max(0, (len(self._pending) - 2 * REACH) // HOP + 1))

    @override
    def finish(self) -> FeatureArray:
        self._pending = np.concatenate((self._pending, np.zeros(REACH + HOP)))
        return self._features(max(1, self._received // HOP) - self._columns)

    def _features(self, columns: int) -> FeatureArray:
        info = self._info
        if not columns:
            return np.empty((info.num_mel_bins, 0), np.float32)
        read = self._pending[: (columns - 1) * HOP + 2 * REACH]
        self._pending = self._pending[columns * HOP :]
        self._columns += columns
        logs = nemo_log_mel_columns(read, info.num_mel_bins, bfloat16=info.bfloat16_filters)
        return logs.astype(np.float32)


def feature_maker(info: Streams) -> FeatureMaker:
    """The maker of a model's features, for one piece of audio."""
    return FrameMaker(info) if isinstance(info, DelayedStreamsInfo) else ColumnMaker(info)


def frames_of(samples: Samples, info: Streams) -> FeatureArray:
    """The features of audio (1-D at 16 kHz). Takes milliseconds per second of audio."""
    maker = feature_maker(info)
    return np.concatenate((maker.push(samples), maker.finish()), 1)
