"""Where long audio is cut into windows that a model takes: in a pause, with every sample in one window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.multimodal.audio.features import SAMPLE_RATE

_STEP = SAMPLE_RATE // 100  # samples between places at which loudness is compared
_FRAME = SAMPLE_RATE * 3 // 10  # samples over which loudness is averaged: longer than the silence before a "p"
_NEARLY = 2.0  # times the power of the quietest place, at which another one is as good
_QUIET = 0.03  # of the mean power: a pause, whatever the quietest place is
SEARCH_SECONDS = 15.0  # at the end of a window, in which a pause is looked for


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the audio.

    Attributes:
        start, end: positions in samples from the start of the audio.
    """

    start: int
    end: int

    @property
    def offset(self) -> float:
        """Seconds from the start of the audio."""
        return self.start / SAMPLE_RATE

    @property
    def seconds(self) -> float:
        """Duration."""
        return (self.end - self.start) / SAMPLE_RATE


def cut(samples: NDArray[np.float32], seconds: float) -> list[Window]:
    """Cut audio into windows, each of which begins where the one before ends, in a pause.

    Args:
        samples: 1-D at 16 kHz.
        seconds: greatest length of a window.

    Returns:
        Windows that cover all samples; none if there are none.
    """
    most = round(seconds * SAMPLE_RATE)
    back = round(min(SEARCH_SECONDS, seconds / 2) * SAMPLE_RATE)
    windows: list[Window] = []
    start = 0
    while len(samples) - start > most:
        end = start + most - back + last_pause(samples[start + most - back : start + most])
        windows.append(Window(start, end))
        start = end
    if start < len(samples):
        windows.append(Window(start, len(samples)))
    return windows


def cut_between(samples: NDArray[np.float32], speech: Sequence[tuple[int, int]], seconds: float) -> list[Window]:
    """Cut audio into windows that hold its speech; silence around them may be left out.

    Args:
        samples: 1-D at 16 kHz.
        speech: start and end of each stretch of speech, in order, in samples.
        seconds: greatest length of a window. Stretches that fit into one window share it.
    """
    most = round(seconds * SAMPLE_RATE)
    windows: list[Window] = []
    for start, end in speech:
        if windows and end - windows[-1].start <= most:
            windows[-1] = Window(windows[-1].start, end)
        elif end - start <= most:
            windows.append(Window(start, end))
        else:
            parts = cut(samples[start:end], seconds)
            windows += [Window(start + part.start, start + part.end) for part in parts]
    return windows


def last_pause(samples: NDArray[np.float32]) -> int:
    """Return where the last pause is, in samples: the last place that is quiet, or nearly as quiet as any.

    It is shortly before the end of a long pause, as silence at the beginning makes models write what nobody says.
    """
    if len(samples) <= _FRAME:
        return len(samples)
    power = np.cumsum(np.square(samples, dtype=np.float64))
    power = np.concatenate([[0.0], power])
    starts = np.arange(0, len(samples) - _FRAME + 1, _STEP)
    energies = power[starts + _FRAME] - power[starts]
    mean = power[-1] * _FRAME / len(samples)
    last = int(np.flatnonzero(energies <= max(energies.min() * _NEARLY, mean * _QUIET))[-1])
    near = energies[max(0, last - _FRAME // _STEP) : last + 1]
    return int(starts[last - int(np.argmin(near[::-1]))]) + _FRAME // 2
