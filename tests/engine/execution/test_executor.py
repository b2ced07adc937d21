"""Executors: steps that run at once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from quire.engine.core import EngineCore
from quire.engine.execution.devices.select import find_device
from quire.engine.execution.executor import ParallelExecutor
from quire.engine.scheduling.encoder_scheduler import EncoderScheduler
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import StepPlan, StepResult
from quire.engine.wire.protocol import AddRequest, PooledOutput, PoolingParams, StepOutput
from quire.kernels import native
from tests.support.engine import Channel

WAIT = 20  # seconds until a test fails instead of waiting for ever
THREADS = torch.get_num_threads


@dataclass
class Runner:
    """Ends the steps of long requests when `may_end` is set, and others at once."""

    may_end: threading.Event = field(default_factory=threading.Event)
    both_run: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))
    threads: list[int] = field(default_factory=list)  # that kernels may use in each step

    def execute(self, plan: StepPlan) -> StepResult:
        first = plan.encoder_requests[0]
        self.threads.append(THREADS())
        if first.request_id.startswith("together"):
            self.both_run.wait(WAIT)
        elif len(first.prompt) > 64:
            assert self.may_end.wait(WAIT)
        return StepResult(pooled={request.request_id: np.ones(3, np.float32) for request in plan.encoder_requests})

    def check(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to release."""


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch, "get_num_threads", lambda: max(2, THREADS()))
    return torch.get_num_threads()


def request(name: str, tokens: int = 100) -> AddRequest:
    return AddRequest(name, np.ones(tokens, np.int32), PoolingParams(task="embed", kind="mean"))


def plan(name: str) -> StepPlan:
    return StepPlan(encoder_requests=[request(name)])


@pytest.mark.skipif(native.kernels is None, reason="steps run one by one without compiled kernels")
def test_steps_run_at_once(cores: int) -> None:
    executor = ParallelExecutor(find_device("cpu"), Runner())
    pending = [executor.submit(plan(f"together-{number}")) for number in range(2)]
    assert all(list(step.result().pooled) == [f"together-{number}"] for number, step in enumerate(pending))
    executor.close()


@pytest.mark.skipif(native.kernels is None, reason="without compiled kernels the number of threads is not set")
def test_a_step_that_is_alone_has_all_cores_and_one_beside_others_has_one(cores: int) -> None:
    runner = Runner()
    executor = ParallelExecutor(find_device("cpu"), runner)
    executor.submit(StepPlan(encoder_requests=[request("alone", 5)])).result()
    thread = threading.Thread(target=lambda: executor.run_beside(StepPlan(encoder_requests=[request("beside", 5)])))
    thread.start()
    thread.join()
    assert runner.threads == [cores, 1]
    executor.close()


def test_an_error_of_the_runner_is_raised_by_the_result() -> None:
    runner = Runner()
    runner.both_run.abort()
    executor = ParallelExecutor(find_device("cpu"), runner)
    pending = executor.submit(plan("together"))
    with pytest.raises(threading.BrokenBarrierError):
        pending.result()
    executor.close()


def test_a_short_request_does_not_wait_for_the_steps_in_flight(cores: int) -> None:
    runner, channel = Runner(), Channel()
    limits = SchedulerLimits(max_seqs=4, max_tokens=100, max_model_len=1000)
    executor = ParallelExecutor(find_device("cpu"), runner)
    core = EngineCore(EncoderScheduler(limits), executor, channel, vocab_size=10)  # type: ignore[arg-type]
    names = [f"long-{number}" for number in range(2 * executor.max_steps_in_flight)]
    for name in names:
        core._handle(request(name))
    for _ in range(executor.max_steps_in_flight):
        core.step()
    core._handle(request("short", 5))
    while not answered(channel):
        core.step()
    assert answered(channel) == ["short"]
    runner.may_end.set()
    while core.has_work:
        core.step()
    core.check()
    assert sorted(answered(channel)) == sorted([*names, "short"])
    core.close()


def answered(channel: Channel) -> list[str]:
    outputs = [output for message in channel.sent if isinstance(message, StepOutput) for output in message.outputs]
    assert all(isinstance(output, PooledOutput) for output in outputs), outputs
    return [output.request_id for output in outputs]
