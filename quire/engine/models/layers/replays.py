"""Steps without Python between their kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import CapturedCalls, Workspace

MOST_TOKENS = 1024  # of a step, from which on the kernels take so long that Python between them does not matter
_SEEN = 3  # steps of one kind before the next is recorded


class Replays:
    """Runs steps. Those that differ in nothing but numbers are recorded, and from then on replayed.

    They are of two kinds: in the one each token is the last of its sequence, in the other not all are.
    """

    def __init__(self) -> None:
        self._workspace = Workspace(MOST_TOKENS)
        self._seen: Counter[bool] = Counter()
        self._recordings: dict[bool, CapturedCalls] = {}
        self._hopeless: set[bool] = set()  # kinds that turned out to compute with torch

    def run(self, step: Callable[[], Tensor], tokens: int, ends: int) -> None:
        """Do what a step of so many tokens and last tokens does, whose inputs and result lie where those of others do.

        Args:
            tokens: at most `MOST_TOKENS`.
        """
        every = ends == tokens
        recording = self._recordings.get(every)
        if recording is not None:
            recording.replay((tokens, ends))
        elif every in self._hopeless or native.instructions() is None or self._seen[every] < _SEEN or ends == 0:
            self._seen[every] += 1
            step()
        else:
            self._record(step, tokens, ends)

    def _record(self, step: Callable[[], Tensor], tokens: int, ends: int) -> None:
        recording = CapturedCalls(step, self._workspace, (tokens, ends))
        if recording.complete:
            self._recordings[ends == tokens] = recording
        else:
            self._hopeless.add(ends == tokens)
            self._workspace = Workspace(MOST_TOKENS)  # without what this step took of the other
