"""Input features of audio models: log-mel spectrograms, or samples."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 16_000  # samples per second
HOP = 160  # samples between columns
_WINDOW = 400  # samples of a frame
REACH = _WINDOW // 2  # samples of a frame on each side of its center
_FLOOR = 1e-10  # of the power
_RANGE = 8.0  # powers of ten below the loudest value that are kept
_SLICE = 1024  # frames that are transformed at once: 6 MiB
_MAX_HZ = SAMPLE_RATE / 2
_LINEAR_HZ = 1000.0  # Slaney's mel scale is linear below, and logarithmic above
_LINEAR_MELS = 15.0  # mels of the linear part
_LOG_STEP = 27.0 / np.log(6.4)  # mels for each factor of e
# HTK's mel scale: mels for each factor of e
_HTK_HZ = 700.0
_HTK_STEP = 2595.0 / np.log(10.0)
_PREEMPHASIS = 0.97
_LONG_FRAME = 512  # samples that are transformed for a frame of _WINDOW
_LOG_ZERO = 2.0**-24  # added to the power
_KALDI_TOP_HZ = 7690.0  # of the filters of Kaldi's features
_KALDI_SCALE = 32768.0  # of samples: they are read as integers of 16 bits
_DEVIATION, _VARIANCE = 1e-5, 1e-7  # added to the deviation of a band, and to the variance of samples


def log_mel(samples: NDArray[np.float32], num_mel_bins: int, seconds: float = 30.0) -> NDArray[np.float32]:
    """The log-mel spectrogram of audio that is padded with silence, as Whisper's feature extractor makes it.

    Args:
        samples: 1-D at 16 kHz; what is longer than `seconds` is cut off.
        num_mel_bins: 80 or 128 with Whisper.
        seconds: duration to which the audio is padded.

    Returns:
        Array of shape (num_mel_bins, 100 * seconds).
    """
    total = round(seconds * SAMPLE_RATE)
    columns = total // HOP
    samples = samples[:total]
    padded = _padded(samples, total)
    # Columns that begin behind the audio are silent.
    sounding = min(columns, -(-(len(samples) + REACH) // HOP) + 1)
    spectrogram = np.full((num_mel_bins, columns), np.log10(_FLOOR), np.float64)
    spectrogram[:, :sounding] = log_mel_columns(padded[: (sounding - 1) * HOP + _WINDOW], num_mel_bins)
    np.maximum(spectrogram, spectrogram.max() - _RANGE, out=spectrogram)
    spectrogram += 4.0
    spectrogram /= 4.0
    return spectrogram.astype(np.float32)


def log_mel_columns(samples: NDArray[np.float64], num_mel_bins: int) -> NDArray[np.float64]:
    """Logarithms to the base of 10 of the power in each band, of every frame of 400 samples within `samples`.

    Frames begin `HOP` samples apart.

    Returns:
        Array of shape (num_mel_bins, columns).
    """
    filters = mel_filters(num_mel_bins)
    views = np.lib.stride_tricks.sliding_window_view(samples, _WINDOW)[::HOP]
    columns = np.empty((num_mel_bins, len(views)))
    for start in range(0, len(views), _SLICE):
        transformed = np.fft.rfft(views[start : start + _SLICE] * _hann())
        power = transformed.real**2 + transformed.imag**2
        columns[:, start : start + len(power)] = np.log10(np.maximum(filters @ power.T, _FLOOR))
    return columns


def normalized_log_mel(samples: NDArray[np.float32], num_mel_bins: int) -> NDArray[np.float32]:
    """The log-mel spectrogram of audio that is not padded, each band normalized over time, as NeMo makes it.

    Args:
        samples: 1-D at 16 kHz; shorter audio than two columns is padded with silence.
        num_mel_bins: bands.

    Returns:
        Array of shape (num_mel_bins, len(samples) // 160).
    """
    signal = np.pad(samples.astype(np.float64), (0, max(0, 2 * HOP - len(samples))))
    spectrogram = nemo_log_mel_columns(np.pad(preemphasized(signal), REACH), num_mel_bins)[:, : len(signal) // HOP]
    spectrogram -= spectrogram.mean(axis=1, keepdims=True)
    spectrogram /= spectrogram.std(axis=1, ddof=1, keepdims=True) + _DEVIATION
    return spectrogram.astype(np.float32)


def preemphasized(samples: NDArray[np.float64], before: float = 0.0) -> NDArray[np.float64]:
    """Samples (1-D) minus 0.97 times the sample before each. `before`: the sample before the first one."""
    return samples - _PREEMPHASIS * np.concatenate(([before], samples[:-1]))


def nemo_log_mel_columns(
    samples: NDArray[np.float64], num_mel_bins: int, *, bfloat16: bool = False
) -> NDArray[np.float64]:
    """Natural logarithms of the power in each band, of every frame of 400 samples within `samples`, as of NeMo.

    Frames begin `HOP` samples apart.

    Args:
        samples: 1-D, with preemphasis.
        num_mel_bins: bands.
        bfloat16: window and filters are rounded to bfloat16.

    Returns:
        Array of shape (num_mel_bins, columns).
    """
    window = np.hanning(_WINDOW)
    filters = mel_filters(num_mel_bins, _LONG_FRAME)
    if bfloat16:
        window, filters = _rounded_to_bfloat16(window), _rounded_to_bfloat16(filters)
    views = np.lib.stride_tricks.sliding_window_view(samples, _WINDOW)[::HOP]
    columns = np.empty((num_mel_bins, len(views)))
    for start in range(0, len(views), _SLICE):
        transformed = np.fft.rfft(views[start : start + _SLICE] * window, _LONG_FRAME)
        power = transformed.real**2 + transformed.imag**2
        columns[:, start : start + len(power)] = np.log(filters @ power.T + _LOG_ZERO)
    return columns


def _rounded_to_bfloat16(values: NDArray[np.float64]) -> NDArray[np.float64]:
    bits = values.astype(np.float32).view(np.uint32)
    nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return nearest_even.astype(np.uint32).view(np.float32).astype(np.float64)


def stacked_columns(samples: int) -> int:
    """Columns of `stacked_log_mel`; 0: there are too few samples to be reflected at their ends."""
    return (samples // HOP + 1) // 2 if samples > _LONG_FRAME // 2 else 0


def stacked_log_mel(samples: NDArray[np.float32], num_mel_bins: int) -> NDArray[np.float32]:
    """The log-mel spectrogram of audio that is not padded, two frames in each column, as Granite Speech reads it.

    Args:
        samples: 1-D at 16 kHz, of which `stacked_columns` is at least 1.
        num_mel_bins: bands of a frame.

    Returns:
        Array of shape (2 * num_mel_bins, stacked_columns(len(samples))).
    """
    padded = np.pad(samples.astype(np.float64), _LONG_FRAME // 2, mode="reflect")
    window = np.pad(_hann(), (_LONG_FRAME - _WINDOW) // 2)
    powers = _powers(np.lib.stride_tricks.sliding_window_view(padded, _LONG_FRAME)[::HOP], window)
    filters = htk_filters(num_mel_bins)
    frames = np.concatenate([np.log10(np.maximum(power @ filters.T, _FLOOR)) for power in powers])
    frames = np.maximum(frames, frames.max() - _RANGE) / 4.0 + 1.0
    columns = len(frames) // 2
    stacked: NDArray[np.float32] = frames[: 2 * columns].reshape(columns, -1).T.astype(np.float32)
    return stacked


def kaldi_columns(samples: int) -> int:
    """Columns of `kaldi_log_mel`: whole frames."""
    return (samples - _WINDOW) // HOP + 1 if samples >= _WINDOW else 0


def kaldi_log_mel(samples: NDArray[np.float32], num_mel_bins: int) -> NDArray[np.float32]:
    """The log-mel spectrogram of whole frames, each with preemphasis, as Kaldi makes it and Phi-4 reads it.

    Args:
        samples: 1-D at 16 kHz, of which `kaldi_columns` is at least 1.
        num_mel_bins: bands.

    Returns:
        Array of shape (num_mel_bins, kaldi_columns(len(samples))).
    """
    views = np.lib.stride_tricks.sliding_window_view(samples, _WINDOW)[::HOP]
    filters = kaldi_filters(num_mel_bins)
    parts = []
    for start in range(0, len(views), _SLICE):
        frames = views[start : start + _SLICE].astype(np.float64)
        earlier = np.concatenate((frames[:, :1], frames[:, :-1]), 1)
        emphasized = (frames - _PREEMPHASIS * earlier) * _KALDI_SCALE
        (power,) = _powers(emphasized, np.hamming(_WINDOW))
        parts.append(np.log(np.maximum(power @ filters.T, 1.0)))
    return np.concatenate(parts).T.astype(np.float32)


def _powers(frames: NDArray[np.float64], window: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    """(frames, _LONG_FRAME / 2 + 1) powers of some frames after the others."""
    for start in range(0, len(frames), _SLICE):
        transformed = np.fft.rfft(frames[start : start + _SLICE] * window, _LONG_FRAME)
        yield transformed.real**2 + transformed.imag**2


def normalized_samples(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Samples (1-D) with a mean of 0 and a variance of 1, as wav2vec 2.0 reads them."""
    wide = samples.astype(np.float64)
    wide -= wide.mean()
    wide /= np.sqrt(wide.var() + _VARIANCE)
    return wide.astype(np.float32)


def _padded(samples: NDArray[np.float32], total: int) -> NDArray[np.float64]:
    """The audio, then silence, with both ends reflected: a frame is centered at each multiple of the hop."""
    padded = np.zeros(total + 2 * REACH, np.float64)
    padded[REACH : REACH + len(samples)] = samples
    padded[:REACH] = padded[2 * REACH : REACH : -1]
    padded[total + REACH :] = padded[total + REACH - 2 : total - 2 : -1]
    return padded


@lru_cache(maxsize=1)
def _hann() -> NDArray[np.float64]:
    steps = np.arange(_WINDOW, dtype=np.float64)
    return 0.5 - 0.5 * np.cos(2 * np.pi * steps / _WINDOW)


@lru_cache(maxsize=4)
def mel_filters(count: int, frame: int = _WINDOW) -> NDArray[np.float64]:
    """Triangular filters of equal area, spaced evenly on Slaney's mel scale up to 8 kHz: (count, frame / 2 + 1).

    `frame`: samples that are transformed at once.
    """
    top = _LINEAR_MELS + _LOG_STEP * np.log(_MAX_HZ / _LINEAR_HZ)
    mels = np.linspace(0.0, top, count + 2)
    edges = np.where(
        mels < _LINEAR_MELS,
        mels * _LINEAR_HZ / _LINEAR_MELS,
        _LINEAR_HZ * np.exp((mels - _LINEAR_MELS) / _LOG_STEP),
    )
    bins = np.linspace(0.0, _MAX_HZ, frame // 2 + 1)
    low = edges[:-2, None]
    high = edges[2:, None]
    filters: NDArray[np.float64] = _triangles(edges, bins) * (2.0 / (high - low))
    return filters


@lru_cache(maxsize=4)
def htk_filters(
    count: int, frame: int = _LONG_FRAME, bottom_hz: float = 0.0, top_hz: float = _MAX_HZ
) -> NDArray[np.float64]:
    """Triangular filters of equal height, spaced evenly on HTK's mel scale: (count, frame / 2 + 1).

    `frame`: samples that are transformed at once; `bottom_hz`, `top_hz`: where the first filter begins, and the last
    one ends.
    """
    bottom, top = (_hz_to_mel(np.float64(hz)) for hz in (bottom_hz, top_hz))
    edges = _mel_to_hz(np.linspace(bottom, top, count + 2))
    return _triangles(edges, np.linspace(0.0, _MAX_HZ, frame // 2 + 1))


@lru_cache(maxsize=2)
def kaldi_filters(count: int) -> NDArray[np.float64]:
    """Filters up to _KALDI_TOP_HZ, which are triangles on HTK's mel scale: (count, _LONG_FRAME / 2 + 1)."""
    edges = np.linspace(0.0, _hz_to_mel(np.float64(_KALDI_TOP_HZ)), count + 2)
    return _triangles(edges, _hz_to_mel(np.linspace(0.0, _MAX_HZ, _LONG_FRAME // 2 + 1)))


def _triangles(edges: NDArray[np.float64], bins: NDArray[np.float64]) -> NDArray[np.float64]:
    """(filters, bins): each filter rises from an edge to the next one, and falls to the one behind it."""
    low = edges[:-2, None]
    middle = edges[1:-1, None]
    high = edges[2:, None]
    rising, falling = (bins - low) / (middle - low), (high - bins) / (high - middle)
    triangles: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return triangles


def _hz_to_mel(hz: NDArray[np.float64] | np.float64) -> NDArray[np.float64]:
    return np.asarray(_HTK_STEP * np.log1p(hz / _HTK_HZ))


def _mel_to_hz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    hz: NDArray[np.float64] = _HTK_HZ * np.expm1(mels / _HTK_STEP)
    return hz
