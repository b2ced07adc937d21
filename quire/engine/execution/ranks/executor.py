"""ShardedExecutor: runs each step on all ranks."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass

from typing_extensions import override

from quire.engine.execution.executor import Executor, PendingStep
from quire.engine.execution.ranks.messages import RunStep
from quire.engine.execution.ranks.workers import Workers
from quire.engine.models.distributed.group import RankGroups
from quire.engine.scheduling.plan import SampledTokens, StepPlan, StepResult


class ShardedExecutor(Executor):
    """Send each plan to the workers, and run the core's part of the step.

    The tokens that steps have sampled are sent with the next plan, because only the core samples. With several pipeline
    stages as many steps are in flight: the first stage computes one while the others compute those before it.
    """

    def __init__(self, inner: Executor, workers: Workers, groups: RankGroups) -> None:
        """`inner`: runs the steps of this rank."""
        self.max_steps_in_flight = groups.placement.stages
        self._inner = inner
        self._workers = workers
        self._groups = groups
        self._in_flight: deque[_RankStep] = deque()
        self._sampled: list[SampledTokens] = []

    @override
    def submit(self, plan: StepPlan) -> PendingStep:
        self._finish_steps_of({*plan.removed})
        self._workers.send(RunStep(plan, self._sampled))
        self._sampled = []
        with self._workers.noticing_death():
            step = _RankStep(self, plan, self._inner.submit(plan))
        self._in_flight.append(step)
        return step

    def finish(self, step: _RankStep) -> StepResult:
        """The result of a step; waits for it and those before it."""
        while step.value is None:
            oldest = self._in_flight.popleft()
            with self._workers.noticing_death():
                oldest.value = oldest.pending.result()
            self._workers.ensure_alive()  # else a GPU did not wait for the rank that has ended: the tokens are wrong
            self._sampled += [SampledTokens(sequence.request_id, sequence.tokens) for sequence in oldest.value.sampled]
        return step.value

    @override
    def prefault(self) -> bool:
        return self._inner.prefault()

    @override
    def ensure_alive(self) -> None:
        self._workers.ensure_alive()

    @override
    def check(self) -> None:
        self._inner.check()

    @override
    def close(self) -> None:
        self._inner.close()
        error = sys.exception()  # what has ended the core, if it closes because of an error
        self._workers.close("" if error is None else str(error) or type(error).__name__)
        self._groups.close()

    def _finish_steps_of(self, removed: set[str]) -> None:
        """Finish the steps of sequences that leave the batch now: their rows are free afterwards."""
        if not removed or not self._in_flight:
            return
        last = [
            step for step in self._in_flight if any(sequence.request_id in removed for sequence in step.plan.scheduled)
        ]
        if last:
            self.finish(last[-1])


@dataclass(slots=True)
class _RankStep(PendingStep):
    """A step that the workers were told to run. `pending`: the core's part of it."""

    executor: ShardedExecutor
    plan: StepPlan
    pending: PendingStep
    value: StepResult | None = None

    @override
    def wait(self, seconds: float) -> bool:
        return self.value is not None or self.pending.wait(seconds)

    @override
    def result(self) -> StepResult:
        return self.executor.finish(self)
