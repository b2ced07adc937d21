"""Where somebody speaks in a part of a window, by voice activity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.multimodal.audio.features import SAMPLE_RATE
from quire.multimodal.audio.voice_activity import find_speech

_THRESHOLD = 0.5
_SILENCE_MS = 100  # between two stretches
_SHORTEST = 0.25  # seconds of speech that may be a word


@dataclass(frozen=True, slots=True)
class SpeechStretches:
    """Stretches of speech with silence between them: start and end in seconds, in order. None: no speech was found."""

    stretches: Sequence[tuple[float, float]] = ()

    def frames(self, count: int, seconds_per_frame: float) -> NDArray[np.int64]:
        """Return which of so many frames hold speech; all of them if none does, as in music."""
        middles = (np.arange(count) + 0.5) * seconds_per_frame
        inside = np.zeros(count, np.bool_)
        for start, end in self.stretches:
            inside |= (start <= middles) & (middles < end)
        return np.flatnonzero(inside if inside.any() else ~inside)

    def around(self, start: float, end: float) -> tuple[float, float] | None:
        """Return the stretch that holds most of a time; None if there is none."""
        shared = [(min(end, stretch[1]) - max(start, stretch[0]), stretch) for stretch in self.stretches]
        most, stretch = max(shared, default=(-1.0, None))
        return stretch if most >= 0 else None

    def has(self, seconds: float) -> bool:
        """Return whether somebody speaks at a time."""
        return any(start < seconds < end for start, end in self.stretches)

    def since(self, seconds: float) -> SpeechStretches:
        """Return the stretches in what is left from a time on, which becomes 0."""
        later = [(max(start - seconds, 0.0), end - seconds) for start, end in self.stretches]
        return SpeechStretches([(start, end) for start, end in later if end > 0])

    def after(self, seconds: float) -> SpeechStretches:
        """Return what is spoken later, if it is long enough for a word."""
        later = [(max(start, seconds), end) for start, end in self.stretches if end > seconds]
        return SpeechStretches(later if sum(end - start for start, end in later) >= _SHORTEST else ())


def find_stretches(samples: NDArray[np.float32]) -> SpeechStretches:
    """Return where somebody speaks in 1-D audio at 16 kHz. Takes some tens of milliseconds."""
    spans = find_speech(samples, _THRESHOLD, 0, _SILENCE_MS, 0)
    return SpeechStretches([(start / SAMPLE_RATE, end / SAMPLE_RATE) for start, end in spans])
