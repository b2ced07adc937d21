"""How sequences are divided among the steps that the stages of a pipeline compute at the same time.

With N stages and n sequences, each step in flight has n / N of them, if that makes it faster. Small steps take as long
as those with one token, because reading the weights takes the time: dividing these would only cost. A stage is then
busy with one step of all sequences after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from quire.engine.scheduling.request import Request

_LEAST = 8  # sequences of a step; with fewer it takes about as long (benchmarks/measured/engine.md)


class StepShares:
    """Limit the sequences of each step to its share."""

    def __init__(self, stages: int) -> None:
        """`stages`: pipeline stages; as many steps are in flight."""
        self._stages = stages
        self._in_flight: deque[bool] = deque()  # whether each of the steps in flight decodes
        self._decodes = False

    def share(self, sequences: int) -> int:
        """How many of some sequences a step has at most."""
        return -(-sequences // self._steps(sequences))

    def begin_step(self, running: Sequence[Request], pending: list[int]) -> None:
        """Take decoding sequences out of a step that other steps have later, or that wait for others.

        Prompts have no share: a step takes as much of them as its budget of tokens allows, and the next one continues.

        Args:
            running: the sequences in the batch.
            pending: number of tokens of each that the step may compute; 0 afterwards for those taken out.
        """
        if self._stages == 1:
            return
        decoding = [index for index, request in enumerate(running) if request.decodes]
        ready = [index for index in decoding if pending[index]]
        busy = sum(self._in_flight) >= self._steps(len(decoding))
        taken = 0 if busy else self.share(len(decoding))
        for index in ready[taken:]:
            pending[index] = 0
        self._decodes = bool(ready[:taken])

    def submit(self) -> None:
        """The step is in flight."""
        self._in_flight.append(self._decodes)

    def finish(self) -> None:
        """The oldest step has finished."""
        self._in_flight.popleft()

    def _steps(self, sequences: int) -> int:
        """Among how many steps some sequences are divided."""
        return max(1, min(self._stages, sequences // _LEAST))
