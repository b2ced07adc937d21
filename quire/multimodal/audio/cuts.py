"""Where long audio is cut into windows that a model takes: at the quietest place, with every sample in one window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.multimodal.audio.features import SAMPLE_RATE

_STEP = SAMPLE_RATE // 100  # samples between places at which loudness is compared
_FRAME = SAMPLE_RATE // 10  # samples over which loudness is averaged


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


def cut(samples: NDArray[np.float32], seconds: float, search: float = 5.0) -> list[Window]:
    """Cut audio into windows, each of which begins where the one before ends.

    Args:
        samples: 1-D at 16 kHz.
        seconds: greatest length of a window.
        search: seconds at the end of a window in which the quietest place is looked for.

    Returns:
        Windows that cover all samples; none if there are none.
    """
    most, back = round(seconds * SAMPLE_RATE), round(min(search, seconds / 2) * SAMPLE_RATE)
    windows: list[Window] = []
    start = 0
    while len(samples) - start > most:
        end = start + most - back + quietest(samples[start + most - back : start + most])
        windows.append(Window(start, end))
        start = end
    if start < len(samples):
        windows.append(Window(start, len(samples)))
    return windows


def cut_between(
    samples: NDArray[np.float32], speech: Sequence[tuple[int, int]], seconds: float, search: float = 5.0
) -> list[Window]:
    """Cut audio into windows that hold its speech; silence around them may be left out.

    Args:
        samples: 1-D at 16 kHz.
        speech: start and end of each stretch of speech, in order, in samples.
        seconds: greatest length of a window. Stretches that fit into one window share it.
        search: see `cut`; for stretches that are longer than a window.
    """
    most = round(seconds * SAMPLE_RATE)
    windows: list[Window] = []
    for start, end in speech:
        if windows and end - windows[-1].start <= most:
            windows[-1] = Window(windows[-1].start, end)
        elif end - start <= most:
            windows.append(Window(start, end))
        else:
            parts = cut(samples[start:end], seconds, search)
            windows += [Window(start + part.start, start + part.end) for part in parts]
    return windows


def quietest(samples: NDArray[np.float32]) -> int:
    """The middle of the quietest tenth of a second, in samples; of several, the last one."""
    if len(samples) <= _FRAME:
        return len(samples)
    power = np.cumsum(np.square(samples, dtype=np.float64))
    power = np.concatenate([[0.0], power])
    starts = np.arange(0, len(samples) - _FRAME + 1, _STEP)
    energies = power[starts + _FRAME] - power[starts]
    last = len(energies) - 1 - int(np.argmin(energies[::-1]))
    return int(starts[last]) + _FRAME // 2
