"""ShardedExecutor: runs each step on all ranks."""

from __future__ import annotations

from typing_extensions import override

from quire.engine.execution.executor import Executor, FinishedStep, PendingStep
from quire.engine.execution.ranks.messages import RunStep
from quire.engine.execution.ranks.workers import Workers
from quire.engine.models.parallel.group import RankGroups
from quire.engine.scheduling.plan import SampledTokens, StepPlan


class ShardedExecutor(Executor):
    """Sends each plan to the workers, and runs the core's part of the step.

    The tokens that a step samples are sent with the next plan, because only the core samples.
    """

    max_steps_in_flight = 1

    def __init__(self, inner: Executor, workers: Workers, groups: RankGroups) -> None:
        """`inner`: runs the steps of this rank."""
        self._inner = inner
        self._workers = workers
        self._groups = groups
        self._sampled: list[SampledTokens] = []

    @override
    def submit(self, plan: StepPlan) -> PendingStep:
        self._workers.send(RunStep(plan, self._sampled))
        try:
            result = self._inner.submit(plan).result()
        except (RuntimeError, OSError) as error:  # torch.distributed raises them when another rank has ended
            self._workers.raise_death(error)
        self._sampled = [SampledTokens(one.request_id, one.tokens) for one in result.sampled]
        return FinishedStep(result)

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
        self._workers.close()
        self._groups.close()
