"""Noise at a ratio to the speech: from white over pink to brown, or the voices of many people at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
KINDS = ("white", "pink", "babble")
BABBLE_VOICES = (5, 9)  # at least, less than
_FAST = 4096  # lengths that are multiples of it are transformed fast
_MAX_SLOPE = 2.0  # of the power over frequency: 0 is white, 1 pink, 2 brown


def coloured(generator: np.random.Generator, length: int, slope: float) -> Samples:
    """Noise whose power falls with frequency to the power of ``slope``, 1-D."""
    longer = -(-length // _FAST) * _FAST
    spectrum = np.fft.rfft(generator.standard_normal(longer, np.float32))
    frequencies = np.maximum(np.fft.rfftfreq(longer), 1 / longer).astype(np.float32)
    shaped: NDArray[np.floating] = np.fft.irfft(spectrum * frequencies ** (-slope / 2), longer)
    return shaped[:length].astype(np.float32)


def babble(generator: np.random.Generator, length: int, voice: Callable[[int], Samples]) -> Samples:
    """Several voices at once. ``voice``: samples of a recording, from a random number below 2**31."""
    mixed = np.zeros(length, np.float32)
    for _ in range(generator.integers(*BABBLE_VOICES)):
        said = voice(int(generator.integers(2**31)))
        said = said / max(1e-6, float(np.sqrt(np.mean(said**2))))
        repeated = np.resize(said, length + len(said))
        offset = generator.integers(len(said))
        mixed += repeated[offset : offset + length]
    return mixed


def make_noise(
    generator: np.random.Generator, length: int, voice: Callable[[int], Samples], kind: str | None = None
) -> Samples:
    """Noise of a kind, 1-D. ``kind``: one of KINDS; None: babble or any slope."""
    if kind == "babble" or (kind is None and generator.random() < 0.3):
        return babble(generator, length, voice)
    slope = generator.uniform(0, _MAX_SLOPE) if kind is None else float(KINDS.index(kind))
    return coloured(generator, length, slope)


def add_noise(samples: Samples, noise: Samples, speech_power: float, decibels: float) -> Samples:
    """Add noise so that the power of speech is this much above that of the noise."""
    power = max(1e-12, float(np.mean(noise.astype(np.float64) ** 2)))
    return samples + noise * np.float32(np.sqrt(speech_power / power / 10 ** (decibels / 10)))
