"""Executors: run the plans of the scheduler, at once or in the background."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from quire.engine.execution.cache import KVCache
from quire.engine.execution.devices.device import Device
from quire.engine.scheduling.plan import StepPlan, StepResult


class PendingStep(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Wait for the step to finish."""


class Runner(Protocol):
    """What runs the steps of an executor."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""

    def check(self) -> None:
        """Assert that the internal state is consistent."""

    def close(self) -> None:
        """Release threads and memory; nothing is executed afterwards."""


class Executor(Protocol):
    """Runs steps in the order in which they are submitted.

    Attributes:
        max_steps_in_flight: submitted steps whose results may be outstanding. With 1 a step's results are known before
            the next step is planned; with more, the scheduler plans ahead while a device computes.
    """

    max_steps_in_flight: int

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step."""

    def prefault(self) -> bool:
        """Do a little background work for later steps; returns whether there is more of it."""

    def check(self) -> None:
        """Assert that the internal state is consistent."""

    def close(self) -> None:
        """Release threads and memory; nothing is submitted afterwards."""


@dataclass(frozen=True, slots=True)
class FinishedStep(PendingStep):
    """A step whose result is known."""

    value: StepResult

    @override
    def result(self) -> StepResult:
        return self.value


class LocalExecutor(Executor):
    """Runs each step in the calling thread, during `submit`."""

    max_steps_in_flight = 1

    def __init__(self, device: Device, runner: Runner, cache: KVCache | None = None) -> None:
        """`cache`: the KV cache of the runner's model; None if it has none."""
        self._device = device
        self._runner = runner
        self._cache = cache

    @override
    def submit(self, plan: StepPlan) -> PendingStep:
        with self._device.activate():
            return FinishedStep(self._runner.execute(plan))

    @override
    def prefault(self) -> bool:
        return self._cache is not None and self._cache.prefault()

    @override
    def check(self) -> None:
        self._runner.check()

    @override
    def close(self) -> None:
        self._runner.close()
