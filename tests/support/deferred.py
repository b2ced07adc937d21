"""An executor that withholds results, as a device that computes in the background does."""

from __future__ import annotations

from quire.engine.execution.executor import Executor, PendingStep
from quire.engine.scheduling.plan import StepPlan, StepResult


class DeferredExecutor:
    """Run the steps of another executor; a result is known only after later steps were submitted.

    Steps run in order, so a step reads the tokens that the steps before it sampled, although the scheduler has not
    seen them yet.
    """

    def __init__(self, inner: Executor, max_steps_in_flight: int = 2) -> None:
        self.max_steps_in_flight = max_steps_in_flight
        self.cache = inner.cache
        self.most_in_flight = self.steps = 0
        self._inner = inner
        self._in_flight = 0

    def submit(self, plan: StepPlan) -> PendingStep:
        self.steps += 1
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        assert self._in_flight <= self.max_steps_in_flight
        return _Withheld(self, self._inner.submit(plan))

    def prefault(self) -> bool:
        return self._inner.prefault()

    def ensure_alive(self) -> None:
        self._inner.ensure_alive()

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()


class _Withheld:
    def __init__(self, executor: DeferredExecutor, pending: PendingStep) -> None:
        self._executor = executor
        self._pending = pending

    def wait(self, seconds: float) -> bool:
        return self._pending.wait(seconds)

    def result(self) -> StepResult:
        self._executor._in_flight -= 1
        return self._pending.result()
