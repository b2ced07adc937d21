"""Executors: run the plans of the scheduler, at once or in the background."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from typing_extensions import override

from quire.engine.execution.cache import KVCache
from quire.engine.scheduling.plan import StepPlan, StepResult
from quire.kernels import native


class PendingStep(Protocol):
    """A submitted step."""

    def wait(self, seconds: float) -> bool:
        """Wait for the step to finish, at most so long; returns whether it has finished."""

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


class RunningStep(Protocol):
    """A step whose work was submitted to a device."""

    def is_done(self) -> bool:
        """Whether the device has finished it."""

    def result(self) -> StepResult:
        """Wait for the device."""


class BackgroundRunner(Runner, Protocol):
    """A runner of steps that a device computes in the background."""

    def start(self, plan: StepPlan) -> RunningStep:
        """Submit the work of one step."""


Activate = Callable[[], AbstractContextManager[None]]  # see `Device.activate`


class Executor(Protocol):
    """Run steps, which begin in the order in which they are submitted.

    Attributes:
        max_steps_in_flight: submitted steps whose results may be outstanding. With 1 a step's results are known before
            the next step is planned; with more, the scheduler plans ahead while a device computes.
        cache: the KV cache, for those who read and write its blocks between steps; None: it has none.
    """

    max_steps_in_flight: int
    cache: KVCache | None = None

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step."""

    def prefault(self) -> bool:
        """Do a little background work for later steps; returns whether there is more of it."""

    def ensure_alive(self) -> None:
        """Check that all other processes that run steps are alive; by default there are none.

        Raises:
            RankDied: one has ended.
        """
        return

    def check(self) -> None:
        """Assert that the internal state is consistent."""

    def close(self) -> None:
        """Release threads and memory; nothing is submitted afterwards."""


@dataclass(frozen=True, slots=True)
class FinishedStep(PendingStep):
    """A step whose result is known."""

    value: StepResult

    @override
    def wait(self, seconds: float) -> bool:
        return True

    @override
    def result(self) -> StepResult:
        return self.value


class LocalExecutor(Executor):
    """Run each step in the calling thread, during `submit`."""

    max_steps_in_flight = 1

    def __init__(self, activate: Activate, runner: Runner) -> None:
        """`activate`: see `Device.activate`."""
        self._activate = activate
        self._runner = runner

    @override
    def submit(self, plan: StepPlan) -> PendingStep:
        with self._activate():
            return FinishedStep(self._runner.execute(plan))

    @override
    def prefault(self) -> bool:
        return False

    @override
    def check(self) -> None:
        self._runner.check()

    @override
    def close(self) -> None:
        self._runner.close()


@dataclass(frozen=True, slots=True)
class _ThreadStep(PendingStep):
    future: Future[StepResult]

    @override
    def wait(self, seconds: float) -> bool:
        try:
            self.future.exception(seconds)  # concurrent.futures.wait takes several times as long
        except TimeoutError:
            return False
        return True

    @override
    def result(self) -> StepResult:
        return self.future.result()


class BackgroundExecutor(Executor):
    """Submit steps to a device from the calling thread, and wait for their results later."""

    def __init__(
        self, activate: Activate, runner: BackgroundRunner, max_steps_in_flight: int, cache: KVCache | None = None
    ) -> None:
        """`activate`: see `Device.activate`. `cache`: the KV cache."""
        self._activate = activate
        self._runner = runner
        self.cache = cache
        self.max_steps_in_flight = max_steps_in_flight

    @override
    def submit(self, plan: StepPlan) -> PendingStep:
        with self._activate():
            return _DeviceStep(self._activate, self._runner.start(plan))

    @override
    def prefault(self) -> bool:
        return self.cache is not None and self.cache.prefault()

    @override
    def check(self) -> None:
        self._runner.check()

    @override
    def close(self) -> None:
        self._runner.close()


_POLL = 1e-4  # seconds between two looks at a device


@dataclass(frozen=True, slots=True)
class _DeviceStep(PendingStep):
    activate: Activate
    running: RunningStep

    @override
    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not (done := self.running.is_done()) and time.monotonic() < deadline:
            time.sleep(_POLL)
        return done

    @override
    def result(self) -> StepResult:
        with self.activate():
            return self.running.result()


_NICENESS = 10  # of threads that run steps


def _lower_priority() -> None:
    """Let the operating system run the event loop and short steps at once, although all cores have steps."""
    if sys.platform == "linux":  # elsewhere it would be the priority of the process
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS))


class ParallelExecutor(Executor):
    """Run several steps at once, each in another thread; for runners without state.

    Threads that share a step wait for each other at the end of every op. So the cores are divided among the steps in
    flight: with as many steps as cores each step has one, and a step that is alone has all of them. Without compiled
    kernels one step runs at a time, on all cores: torch cannot set the number of threads for one calling thread only.
    """

    def __init__(self, activate: Activate, runner: Runner, cores: int | None = None) -> None:
        """`activate`: see `Device.activate`. `cores`: steps that run at once; None: as many as the kernels allow."""
        self._activate = activate
        self._runner = runner
        self._cores = cores or (1 if native.kernels is None else torch.get_num_threads())
        self.max_steps_in_flight = self._cores + 1  # one that is ready when another one ends
        self._threads = ThreadPoolExecutor(self._cores, "quire-step", initializer=_lower_priority)
        self._in_flight = 0
        self._lock = threading.Lock()  # of the counter

    @override
    def submit(self, plan: StepPlan) -> PendingStep:
        self._count(1)
        return _ThreadStep(self._threads.submit(self._run, plan))

    def run_in_this_thread(self, plan: StepPlan) -> PendingStep:
        """Run a short step in the calling thread, on one core, though all threads are busy."""
        return FinishedStep(self._execute(plan, 1))

    @override
    def prefault(self) -> bool:
        return False

    @override
    def check(self) -> None:
        self._runner.check()

    @override
    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._runner.close()

    def _run(self, plan: StepPlan) -> StepResult:
        try:
            return self._execute(plan, max(1, self._cores // self._in_flight))
        finally:
            self._count(-1)

    def _execute(self, plan: StepPlan, threads: int) -> StepResult:
        if native.kernels is not None:
            native.set_threads(threads)
        with self._activate():
            return self._runner.execute(plan)

    def _count(self, change: int) -> None:
        with self._lock:
            self._in_flight += change
