"""Audio files and signals for tests."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import soundfile
from numpy.typing import NDArray

Samples = NDArray[np.float32]
RATE = 16_000
# Container and codec of PyAV, for formats that libsndfile does not write.
_AV = {"m4a": ("mp4", "aac"), "aac": ("adts", "aac"), "webm": ("webm", "libopus"), "mkv": ("matroska", "flac")}


def tone(seconds: float, *, rate: int = RATE, hertz: float = 440.0, channels: int = 1, level: float = 0.5) -> Samples:
    """A sine, of shape (samples, channels)."""
    time = np.arange(round(seconds * rate)) / rate
    wave = (level * np.sin(2 * np.pi * hertz * time)).astype(np.float32)
    return np.repeat(wave[:, None], channels, axis=1)


def encode(samples: Samples, kind: str, *, rate: int = RATE) -> bytes:
    """A file: wav, flac, mp3, vorbis, opus (both in ogg), aiff, m4a, aac, webm or mkv."""
    if kind in _AV:
        return _through_av(samples, *_AV[kind], rate)
    file = io.BytesIO()
    container, subtype = {"vorbis": ("OGG", "VORBIS"), "opus": ("OGG", "OPUS"), "mp3": ("MP3", None)}.get(
        kind, (kind.upper(), None)
    )
    soundfile.write(file, samples, rate, format=container, subtype=subtype)
    return file.getvalue()


def wav(samples: Samples, *, rate: int = RATE) -> bytes:
    """A wav file of 16-bit samples."""
    return encode(samples, "wav", rate=rate)


def _through_av(samples: Samples, container: str, codec: str, rate: int) -> bytes:
    file = io.BytesIO()
    layout = "mono" if samples.shape[1] == 1 else "stereo"
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate)
        assert isinstance(stream, av.AudioStream)
        stream.layout = layout
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T), format="fltp", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        for part in av.AudioResampler(stream.format.name, layout, rate).resample(frame):
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()


def voice(seconds: float, *, hertz: float = 130.0) -> Samples:
    """Something like a voice, 1-D at 16 kHz: a buzz through the formants of changing vowels, in syllables."""
    length = round(seconds * RATE)
    time = np.arange(length) / RATE
    pitch = hertz * (1 + 0.12 * np.sin(2 * np.pi * 0.9 * time) + 0.02 * np.sin(2 * np.pi * 5 * time))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    vowels = np.array([(730, 1090, 2440), (270, 2290, 3010), (570, 840, 2410), (530, 1840, 2480), (300, 870, 2240)])
    place = time * 4.0
    index, share = place.astype(int) % len(vowels), (place % 1)[:, None]
    formants = vowels[index] * (1 - share) + vowels[(index + 1) % len(vowels)] * share
    sound = np.zeros(length)
    for harmonic in range(1, 28):
        frequency = harmonic * pitch
        gain = sum(
            strength / (1 + ((frequency - formants[:, number]) / 90) ** 2)
            for number, strength in enumerate((1.0, 0.5, 0.25))
        )
        sound += gain * np.sin(harmonic * phase)
    sound *= 0.55 + 0.45 * np.sin(2 * np.pi * 4.0 * time - 0.5)
    sound += 0.004 * np.random.default_rng(5).standard_normal(length)
    return (0.4 * sound / max(1e-9, float(np.abs(sound).max()))).astype(np.float32)
