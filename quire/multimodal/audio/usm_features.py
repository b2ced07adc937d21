"""Features of Gemma's encoders of audio, which are Universal Speech Models (Zhang et al. 2023).

Frames are transformed in float32, as transformers' feature extractors do it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.multimodal.audio.features import HOP, htk_filters

# Of Gemma 4
_FRAME = 320  # samples
_TRANSFORMED = 512  # samples of a frame and of zeros behind it
_FLOOR = 1e-3  # added to the sum of magnitudes in a band
# Of Gemma 3n
_LONG_FRAME = 512
_LONG_TRANSFORMED = 1024
_BOTTOM_HZ, _TOP_HZ = 125.0, 7600.0  # of the filters
_PREEMPHASIS = 0.97
_LEAST = 1e-5  # sum of magnitudes in a band
_MULTIPLE = 128  # audio is filled up to a multiple of so many samples
_SLICE = 1024  # frames that are transformed at once


def semicausal_columns(samples: int) -> int:
    """Columns of `semicausal_log_mel`: frames whose samples, and the sample behind them, are all there."""
    return max(0, (samples - 1) // HOP)


def semicausal_log_mel(samples: NDArray[np.float32], num_mel_bins: int) -> NDArray[np.float32]:
    """The logarithms of magnitudes in each band, as Gemma 4 reads them: the first frame is half before the audio.

    Args:
        samples: 1-D at 16 kHz, of which `semicausal_columns` is at least 1.
        num_mel_bins: bands.

    Returns:
        Array of shape (num_mel_bins, semicausal_columns(len(samples))).
    """
    padded = np.pad(samples.astype(np.float32), (_FRAME // 2, 0))
    views = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[::HOP][: semicausal_columns(len(samples))]
    window, filters = _window(_FRAME), htk_filters(num_mel_bins).T
    parts = [
        np.log(np.abs(np.fft.rfft(views[start : start + _SLICE] * window, _TRANSFORMED)) @ filters + _FLOOR)
        for start in range(0, len(views), _SLICE)
    ]
    return np.concatenate(parts).T.astype(np.float32)


def preemphasized_columns(samples: int) -> int:
    """Columns of `preemphasized_log_mel`: whole frames, with the sample behind them, of the audio filled up."""
    filled = samples + -samples % _MULTIPLE
    return (filled - _LONG_FRAME - 1) // HOP + 1 if filled > _LONG_FRAME else 0


def preemphasized_log_mel(samples: NDArray[np.float32], num_mel_bins: int) -> NDArray[np.float32]:
    """The logarithms of magnitudes in each band of frames with preemphasis, as Gemma 3n reads them.

    Args:
        samples: 1-D at 16 kHz, of which `preemphasized_columns` is at least 1.
        num_mel_bins: bands.

    Returns:
        Array of shape (num_mel_bins, preemphasized_columns(len(samples))).
    """
    filled = np.pad(samples.astype(np.float32), (0, -len(samples) % _MULTIPLE))
    views = np.lib.stride_tricks.sliding_window_view(filled, _LONG_FRAME)[::HOP][: preemphasized_columns(len(samples))]
    window, filters = _window(_LONG_FRAME), htk_filters(num_mel_bins, _LONG_TRANSFORMED, _BOTTOM_HZ, _TOP_HZ).T
    parts = []
    for start in range(0, len(views), _SLICE):
        frames = views[start : start + _SLICE]
        emphasized = np.concatenate(
            (frames[:, :1] * (1.0 - _PREEMPHASIS), frames[:, 1:] - _PREEMPHASIS * frames[:, :-1]), 1
        )
        magnitudes = np.abs(np.fft.rfft(emphasized * window, _LONG_TRANSFORMED))
        parts.append(np.log(np.maximum(magnitudes @ filters, _LEAST)))
    return np.concatenate(parts).T.astype(np.float32)


def _window(size: int) -> NDArray[np.float32]:
    """The periodic window of Hann."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)).astype(np.float32)


def sample_frames(samples: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """The samples themselves, filled up with silence: (size, frames)."""
    filled = np.pad(samples.astype(np.float32), (0, -len(samples) % size))
    return filled.reshape(-1, size).T
