"""The audio of a session that is still needed."""

from __future__ import annotations

import numpy as np

from quire.realtime.audio import RATE, Samples

_SMALLEST = RATE  # samples


class AudioBuffer:
    """Samples from `start` to `end`, counted from the beginning of the session. It grows as its user needs it."""

    def __init__(self) -> None:
        self._data: Samples = np.empty(_SMALLEST, np.int16)
        self._first = 0  # index of `start` in `_data`
        self.start = self.end = 0

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self._data.nbytes

    def append(self, samples: Samples) -> None:
        """Add samples at the end."""
        self._make_room(len(samples))
        at = self._first + len(self)
        self._data[at : at + len(samples)] = samples
        self.end += len(samples)

    def drop_before(self, position: int) -> None:
        """Forget what lies before a position."""
        dropped = min(max(position - self.start, 0), len(self))
        self._first += dropped
        self.start += dropped

    def copy(self, start: int, end: int) -> Samples:
        """The samples of a range, as far as they are there."""
        first = self._first - self.start
        return self._data[first + max(start, self.start) : first + max(min(end, self.end), self.start)].copy()

    def _make_room(self, count: int) -> None:
        needed = len(self) + count
        if self._first + needed <= len(self._data):
            return
        capacity = max(_SMALLEST, 1 << (2 * needed - 1).bit_length() - 1)  # the power of two from `needed` up
        data = self._data
        if capacity != len(data) or 2 * needed > len(data):
            data = np.empty(max(capacity, needed), np.int16)
        data[: len(self)] = self._data[self._first : self._first + len(self)]
        self._data, self._first = data, 0
