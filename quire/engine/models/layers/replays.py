"""Decode steps without Python between their kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor

from quire.kernels import native
from quire.kernels.recording import Recording, Workspace

MOST_TOKENS = 128  # of a step, from which on the kernels take so long that Python between them does not matter
_SEEN = 3  # steps of one size before the next is recorded


class Replays:
    """Runs steps; those of one size that differ in nothing but numbers are recorded, and from then on replayed."""

    def __init__(self) -> None:
        self._workspace = Workspace()
        self._seen: Counter[int] = Counter()
        self._by_size: dict[int, Recording] = {}
        self._possible = True  # until steps turn out to compute with torch

    def run(self, step: Callable[[], Tensor], size: int) -> Tensor:
        """What a step of `size` tokens gives, all of whose inputs lie where those of any other one of this size do."""
        recording = self._by_size.get(size)
        if recording is not None:
            return recording.replay()
        if size > MOST_TOKENS or not self._possible or native.instructions() is None:
            return step()
        self._seen[size] += 1
        return step() if self._seen[size] <= _SEEN else self._record(step, size)

    def _record(self, step: Callable[[], Tensor], size: int) -> Tensor:
        recording = Recording(step, self._workspace)
        if recording.complete:
            self._by_size[size] = recording
        else:
            self._possible = False
        return recording.result
