"""Workers and executor when a rank ends, and the GPUs of ranks."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from quire.engine.client.errors import MalformedMessage
from quire.engine.execution.executor import FinishedStep
from quire.engine.execution.ranks.errors import RankDied
from quire.engine.execution.ranks.executor import ShardedExecutor
from quire.engine.execution.ranks.messages import (
    Allocate,
    Connect,
    Failed,
    RankChannel,
    ReceivedSteps,
    RunStep,
    ToWorker,
)
from quire.engine.execution.ranks.workers import RankEntry, Workers, gpu_of_rank
from quire.engine.models.distributed.group import RankGroups
from quire.engine.models.distributed.placement import Placement
from quire.engine.models.distributed.rendezvous import FileRendezvous, Rendezvous
from quire.engine.scheduling.plan import NewSequence, SampledTokens, ScheduledSequence, StepPlan, StepResult
from tests.support.engine import greedy


class FakeRank:
    """A rank that the test ends."""

    exitcode = -9

    def __init__(self, _: RankEntry, __: int, ___: Rendezvous, connection: Connection) -> None:
        self.connection = connection
        self.alive = True

    def is_alive(self) -> bool:
        return self.alive

    def join(self, timeout: float | None = None) -> None:
        pass

    def kill(self) -> None:
        self.alive = False


def make_workers(ranks: int = 2) -> tuple[Workers, list[Any]]:
    started: list[Any] = []

    def launch(entry: RankEntry, rank: int, rendezvous: Rendezvous, connection: Connection) -> FakeRank:
        started.append(FakeRank(entry, rank, rendezvous, connection))
        return started[-1]  # type: ignore[no-any-return]

    return Workers(lambda *_: None, ranks, FileRendezvous(Path(mkdtemp())), launch), started


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, ["0", "1", "2"]),
        ("4,5,6", ["4", "5", "6"]),
        ("GPU-aa, GPU-bb,GPU-cc", ["GPU-aa", "GPU-bb", "GPU-cc"]),
        ("", ["", "", ""]),  # a server on CPUs hides GPUs from its ranks as well
        ("3", ["3", "", ""]),
    ],
)
def test_each_rank_has_the_gpu_with_its_index(visible: str | None, gpus: list[str]) -> None:
    assert [gpu_of_rank(rank, visible) for rank in range(3)] == gpus


def test_a_rank_that_ends_while_ranks_connect_ends_the_core() -> None:
    """Although the core would wait forever: NCCL has no timeout for a rank that does not come."""
    workers, (rank,) = make_workers()
    never = threading.Event()

    def end_rank() -> None:
        RankChannel(rank.connection, ToWorker).send(Failed("out of memory"))
        rank.alive = False

    with pytest.raises(RankDied, match="rank 1 of 2 has stopped: out of memory"):
        workers.run(never.wait, end_rank)  # type: ignore[arg-type]
    never.set()
    workers.close()


def test_an_error_while_ranks_connect_is_raised() -> None:
    workers, (rank,) = make_workers()

    def fail() -> None:
        raise ValueError("no")

    def fail_because_of_the_rank() -> None:
        rank.alive = False
        rank.connection.close()
        raise RuntimeError("connection reset")

    with pytest.raises(ValueError, match="no"):
        workers.run(fail, lambda: None)
    with pytest.raises(RankDied, match="exit code -9"):
        workers.run(fail_because_of_the_rank, lambda: None)
    workers.close()


class InnerExecutor:
    """The core's part of the steps: each sampled sequence gets the next number."""

    def __init__(self) -> None:
        self.token = 0
        self.log: list[str] = []

    def submit(self, plan: StepPlan) -> Any:
        self.log.append("submit")
        inner = self

        class Step(FinishedStep):
            def result(self) -> StepResult:
                inner.log.append("result")
                inner.token += 1
                return StepResult([SampledTokens(sequence.request_id, [inner.token]) for sequence in plan.scheduled])

        return Step(StepResult())

    def close(self) -> None:
        pass


def step_of(*names: str, removed: tuple[str, ...] = ()) -> StepPlan:
    return StepPlan(removed=[*removed], scheduled=[ScheduledSequence(name, 0, 1, (), True) for name in names])


def make_executor(stages: int) -> tuple[ShardedExecutor, InnerExecutor, list[Any]]:
    workers, ranks = make_workers(stages)
    inner = InnerExecutor()
    executor = ShardedExecutor(inner, workers, RankGroups.of(Placement(0, 1, stages)))  # type: ignore[arg-type]
    return executor, inner, ranks


def received(rank: FakeRank) -> RunStep:
    message = RankChannel(rank.connection, ToWorker).receive()
    assert isinstance(message, RunStep)
    return message


def test_tokens_are_sent_with_the_next_plan_after_they_are_known() -> None:
    executor, _, (rank, _) = make_executor(3)
    first, second = executor.submit(step_of("a")), executor.submit(step_of("b"))
    assert first.result().sampled[0].tokens == [1]
    executor.submit(step_of("c"))
    second.result()
    executor.submit(step_of("a"))
    assert [[sequence.request_id for sequence in received(rank).sampled] for _ in range(4)] == [[], [], ["a"], ["b"]]
    executor.close()


def test_steps_of_a_sequence_that_leaves_are_finished_first() -> None:
    """Its row is free afterwards, on all ranks."""
    executor, inner, (rank, _) = make_executor(3)
    first, second = executor.submit(step_of("a")), executor.submit(step_of("b"))
    executor.submit(step_of("c", removed=("a",)))
    assert inner.log == ["submit", "submit", "result", "submit"]
    assert (first.result().sampled[0].tokens, second.result().sampled[0].tokens) == ([1], [2])
    messages = [received(rank) for _ in range(3)]
    assert [sequence.request_id for sequence in messages[2].sampled] == ["a"]
    executor.close()


def test_tokens_of_a_step_that_a_dead_rank_ended_are_not_used() -> None:
    """On GPUs nothing fails: the step only stops to wait for the rank, and computes with what it has."""
    executor, _, (rank,) = make_executor(2)
    step = executor.submit(step_of("a"))
    rank.alive = False
    rank.connection.close()
    with pytest.raises(RankDied):
        step.result()
    executor.close()


def test_other_nodes_learn_what_has_ended_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, if it was told to end."""
    told: list[str] = []
    for error in (None, ValueError("no room"), AssertionError()):
        executor, _, _ = make_executor(2)
        monkeypatch.setattr(executor._workers, "close", told.append)
        try:
            if error is not None:
                raise error
            executor.close()
        except (ValueError, AssertionError):
            executor.close()
        monkeypatch.undo()
        executor._workers.close()
    assert told == ["", "no room", "AssertionError"]


def test_the_core_does_not_wait_for_a_worker_to_read_a_plan() -> None:
    """A plan with a long prompt is larger than the buffer of a pipe."""
    workers, (rank,) = make_workers()
    steps = ReceivedSteps(RankChannel(rank.connection, ToWorker))
    assert steps.next(0.0) is None
    long = NewSequence("a", np.arange(1_000_000, dtype=np.int32), 1_000_000, greedy(1), None)
    for _ in range(2):
        workers.send(RunStep(StepPlan(new=[long]), []))
    for _ in range(2):
        message = steps.next(None)
        assert isinstance(message, RunStep)
        np.testing.assert_array_equal(message.plan.new[0].tokens, long.tokens)
    workers.close()
    with pytest.raises((EOFError, OSError)):
        steps.next(None)


def test_a_message_that_is_no_step_ends_a_worker_that_waits_for_one() -> None:
    workers, (rank,) = make_workers()
    steps = ReceivedSteps(RankChannel(rank.connection, ToWorker))
    workers.send(Connect())
    with pytest.raises(MalformedMessage, match="Connect arrived in place of a step"):
        steps.next(None)
    workers.close()


def test_messages_before_the_first_step_are_no_steps() -> None:
    workers, (rank,) = make_workers()
    channel = RankChannel(rank.connection, ToWorker)
    workers.send(Connect())
    assert channel.receive_one(Connect) == Connect()
    workers.send(Connect())
    with pytest.raises(MalformedMessage, match="Connect arrived in place of Allocate"):
        channel.receive_one(Allocate)
    workers.close()
    with pytest.raises(EOFError):
        channel.receive()
