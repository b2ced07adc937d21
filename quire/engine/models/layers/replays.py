"""Decode steps without Python in their layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quire.engine.models.layers.step import StepContext
from quire.kernels import native
from quire.kernels.recording import Recording, Workspace

_MOST_TOKENS = 128  # of a step, from which on the kernels take so long that Python between them does not matter
_SEEN = 3  # steps of one size before the next is recorded

Layers = Callable[[Tensor, StepContext], Tensor]


@dataclass(frozen=True, slots=True)
class _Replay:
    """A recording and what it reads: the layers' input and the step with its angles."""

    x: Tensor
    step: StepContext
    recording: Recording

    def run(self, x: Tensor, step: StepContext) -> Tensor:
        self.x.copy_(x)
        for rope, angles in self.step.ropes.items():
            angles.cos.copy_(step.ropes[rope].cos)
            angles.sin.copy_(step.ropes[rope].sin)
        return self.recording.replay()


class Replays:
    """Runs layers; steps that differ in nothing but numbers are recorded, and from then on replayed."""

    def __init__(self) -> None:
        self._workspace = Workspace()
        self._seen: Counter[int] = Counter()
        self._by_size: dict[int, _Replay] = {}
        self._possible = True  # until layers turn out to compute with torch

    def run(self, layers: Layers, x: Tensor, step: StepContext) -> Tensor:
        """What layers give for x (tokens, hidden); it is overwritten in the next run."""
        size = len(x)
        if size > _MOST_TOKENS or not (self._possible and step.attend.stays and native.take(x)):
            return layers(x, step)
        if (replay := self._by_size.get(size)) is not None:
            return replay.run(x, step)
        self._seen[size] += 1
        return layers(x, step) if self._seen[size] <= _SEEN else self._record(layers, x, step)

    def _record(self, layers: Layers, x: Tensor, step: StepContext) -> Tensor:
        recording = Recording(lambda: layers(x, step), self._workspace)
        if recording.complete:
            self._by_size[len(x)] = _Replay(x, step, recording)
        else:
            self._possible = False
        return recording.result
