"""How the sequences are divided among the steps that the stages of a pipeline compute at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.scheduling.request import Request


def share(sequences: int, stages: int) -> int:
    """How many of some sequences a step has at most, so that each of the steps in flight has as many.

    As sequences in flight are not scheduled, steps that have their share hold all sequences in turn.
    """
    return -(-sequences // stages)


def leave_to_other_steps(running: Sequence[Request], pending: list[int], stages: int) -> None:
    """Take decoding sequences out of a step that has more than its share of them.

    Prompts need no share: a step takes as much of them as its budget of tokens allows, and the next step continues.

    Args:
        running: the sequences in the batch.
        pending: number of tokens of each that the step may compute; 0 afterwards for those taken out.
        stages: number of steps in flight.
    """
    decoding = [index for index, request in enumerate(running) if request.decodes]
    ready = [index for index in decoding if pending[index]]
    for index in ready[share(len(decoding), stages) :]:
        pending[index] = 0
