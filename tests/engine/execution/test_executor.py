"""Executors: steps that run at once."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import AddRequest, ErrorOutput, PooledOutput, RequestOutput, StepOutput
from quire.engine.core.loop import EngineCore
from quire.engine.execution.devices.select import find_device
from quire.engine.execution.executor import BackgroundExecutor, ParallelExecutor
from quire.engine.scheduling.encoder_scheduler import EncoderScheduler
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import SequenceError, StepPlan, StepResult
from quire.kernels import native
from tests.support.engine import Channel

WAIT = 20  # seconds until a test fails instead of waiting for ever
THREADS = torch.get_num_threads


@dataclass
class Runner:
    """End the steps of long requests when `may_end` is set, and others at once. The result is the prompt's length."""

    may_end: threading.Event = field(default_factory=threading.Event)
    both_run: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))
    threads: list[int] = field(default_factory=list)  # that kernels may use in each step
    callers: set[threading.Thread] = field(default_factory=set)
    running: int = 0
    most_at_once: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.threads.append(THREADS())
        self.callers.add(threading.current_thread())
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            self._wait(plan)
        finally:
            self.running -= 1
        result = StepResult()
        for request in plan.encoder_requests:
            if request.request_id.startswith("bad"):
                result.errors[request.request_id] = SequenceError(f"injected for {request.request_id}")
            else:
                result.pooled[request.request_id] = np.full(3, len(request.prompt), np.float32)
        return result

    def _wait(self, plan: StepPlan) -> None:
        first = plan.encoder_requests[0]
        if first.request_id == "broken":
            raise ZeroDivisionError("injected error")
        if first.request_id.startswith("together"):
            self.both_run.wait(WAIT)
        elif len(first.prompt) > 64:
            assert self.may_end.wait(WAIT)

    def check(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to release."""


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch, "get_num_threads", lambda: max(2, THREADS()))
    return torch.get_num_threads()


def request(name: str, tokens: int = 100) -> AddRequest:
    return AddRequest(name, np.ones(tokens, np.int32), PoolingParams(task="embed", pooling_type="mean"))


def plan(name: str) -> StepPlan:
    return StepPlan(encoder_requests=[request(name)])


@pytest.mark.skipif(native.kernels is None, reason="steps run one by one without compiled kernels")
def test_steps_run_at_once(cores: int) -> None:
    executor = ParallelExecutor(find_device("cpu").activate, Runner())
    pending = [executor.submit(plan(f"together-{number}")) for number in range(2)]
    assert all(list(step.result().pooled) == [f"together-{number}"] for number, step in enumerate(pending))
    executor.close()


@pytest.mark.skipif(native.kernels is None, reason="without compiled kernels the number of threads is not set")
def test_a_step_that_is_alone_has_all_cores_and_one_beside_others_has_one(cores: int) -> None:
    runner = Runner()
    executor = ParallelExecutor(find_device("cpu").activate, runner)
    executor.submit(StepPlan(encoder_requests=[request("alone", 5)])).result()
    thread = threading.Thread(
        target=lambda: executor.run_in_this_thread(StepPlan(encoder_requests=[request("beside", 5)]))
    )
    thread.start()
    thread.join()
    assert runner.threads == [cores, 1]
    executor.close()


def test_an_error_of_the_runner_is_raised_by_the_result_of_its_step(cores: int) -> None:
    """And the steps beside and after it have theirs."""
    runner = Runner()
    executor = ParallelExecutor(find_device("cpu").activate, runner)
    beside, broken, after = executor.submit(plan("long")), executor.submit(plan("broken")), executor.submit(plan("x"))
    runner.may_end.set()
    with pytest.raises(ZeroDivisionError, match="injected error"):
        broken.result()
    assert list(beside.result().pooled) == ["long"]
    assert list(after.result().pooled) == ["x"]
    executor.submit(plan("alone")).result()
    assert runner.threads[-1] == (1 if native.kernels is None else cores), "the broken step counts as running"
    executor.close()


def test_closing_ends_the_threads(cores: int) -> None:
    """Steps that run end first; the ones that wait for a thread are dropped."""
    runner = Runner()
    executor = ParallelExecutor(find_device("cpu").activate, runner)
    pending = [executor.submit(plan(f"together-{number}")) for number in range(2)]
    for step in pending:
        step.result()
    assert runner.callers
    executor.close()
    assert not any(thread.is_alive() for thread in runner.callers)


def test_without_compiled_kernels_one_step_runs_at_a_time(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", None)
    runner = Runner()
    executor = ParallelExecutor(find_device("cpu").activate, runner)
    assert executor.max_steps_in_flight == 2
    pending = [executor.submit(plan(f"long-{number}")) for number in range(4)]
    runner.may_end.set()
    assert [list(step.result().pooled) for step in pending] == [[f"long-{number}"] for number in range(4)]
    assert runner.most_at_once == 1
    assert set(runner.threads) == {THREADS()}
    executor.close()


@pytest.mark.skipif(native.kernels is None, reason="without compiled kernels the number of threads is not set")
def test_the_number_of_threads_is_that_of_one_thread() -> None:
    before, seen = THREADS(), []

    def ask() -> None:
        seen.append(THREADS())

    def change() -> None:
        native.set_threads(before + 2)
        ask()

    for call in (change, ask):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert seen == [before + 2, before]
    assert before == THREADS()


def test_results_and_errors_belong_to_their_requests(cores: int) -> None:
    """With several steps in flight, of which later ones end before earlier ones."""
    core, runner, channel = make_core()
    lengths = {f"{name}-{number}": 70 + 7 * number for number, name in enumerate(["good", "bad", "other"] * 3)}
    for name, length in lengths.items():
        core._handle(request(name, length))
    core._handle(request("bad", 5))
    core.step()
    core.step()
    runner.may_end.set()
    while core.has_work:
        core.step()
    core.check()
    outputs = {output.request_id: output for output in sent(channel)}
    assert outputs.keys() == {*lengths, "bad"}
    for name, output in outputs.items():
        if name.startswith("bad"):
            assert isinstance(output, ErrorOutput)
            assert output.error == f"injected for {name}"
        else:
            assert isinstance(output, PooledOutput)
            assert output.data.tolist() == [lengths[name]] * 3
    core.close()


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_short_request_does_not_wait_for_the_steps_in_flight(waiting: int, cores: int) -> None:
    """Nor in a step that waits for a thread. waiting: how many more steps may be submitted when it arrives."""
    core, runner, channel = make_core()
    names = [f"long-{number}" for number in range(2 * core.executor.max_steps_in_flight)]
    for name in names:
        core._handle(request(name))
    for _ in range(core.executor.max_steps_in_flight - waiting):
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


def make_core() -> tuple[EngineCore, Runner, Channel]:
    runner, channel = Runner(), Channel()
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=100, max_model_len=1000)
    executor = ParallelExecutor(find_device("cpu").activate, runner)
    core = EngineCore(EncoderScheduler(limits), executor, channel, vocab_size=10)  # type: ignore[arg-type]
    return core, runner, channel


def sent(channel: Channel) -> list[RequestOutput]:
    return [output for message in channel.sent if isinstance(message, StepOutput) for output in message.outputs]


def answered(channel: Channel) -> list[str]:
    assert all(isinstance(output, PooledOutput) for output in sent(channel)), channel.sent
    return [output.request_id for output in sent(channel)]


@dataclass
class DeviceRunner(Runner):
    """Steps end when the test says so."""

    finished: set[str] = field(default_factory=set)

    def start(self, plan: StepPlan) -> DeviceStep:
        return DeviceStep(self, plan)


@dataclass
class DeviceStep:
    runner: DeviceRunner
    plan: StepPlan

    def is_done(self) -> bool:
        return self.plan.encoder_requests[0].request_id in self.runner.finished

    def result(self) -> StepResult:
        assert self.is_done()
        return self.runner.execute(self.plan)


def test_a_step_in_the_background_is_waited_for() -> None:
    runner = DeviceRunner()
    executor = BackgroundExecutor(nullcontext, runner, 2)
    assert executor.max_steps_in_flight == 2
    first, second = executor.submit(plan("together")), executor.submit(StepPlan(encoder_requests=[request("x", 3)]))
    assert not first.wait(0.0)
    assert not first.wait(0.001)
    runner.finished |= {"x"}
    assert second.wait(0.0)
    assert list(second.result().pooled) == ["x"]
