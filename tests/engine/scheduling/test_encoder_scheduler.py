"""The scheduler of encoders: whole requests, packed by tokens."""

from __future__ import annotations

import numpy as np
import pytest

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import AddRequest, ErrorOutput, PooledOutput
from quire.engine.scheduling.encoder_scheduler import EncoderScheduler
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import SequenceError, StepPlan, StepResult


def make(max_seqs: int = 8, max_tokens: int = 100, *, by_priority: bool = False) -> EncoderScheduler:
    limits = SchedulerLimits(max_num_seqs=max_seqs, max_num_batched_tokens=max_tokens, max_model_len=1000)
    return EncoderScheduler(limits, by_priority=by_priority)


def add(scheduler: EncoderScheduler, name: str, tokens: int, **fields: object) -> None:
    prompt = np.ones(tokens, np.int32)
    scheduler.add(AddRequest(name, prompt, PoolingParams(task="embed"), **fields))  # type: ignore[arg-type]


def names(plan: StepPlan) -> list[str]:
    return [request.request_id for request in plan.encoder_requests]


def finish(scheduler: EncoderScheduler, plan: StepPlan, *failed: str) -> list[str]:
    """End a step; returns the ids of the requests that are answered with arrays."""
    ones = np.ones(3, np.float32)
    result = StepResult(
        pooled={name: ones for name in names(plan) if name not in failed},
        errors={name: SequenceError("it broke") for name in failed},
    )
    outputs = scheduler.update(plan, result)
    assert {output.request_id for output in outputs if isinstance(output, ErrorOutput)} <= set(failed)
    scheduler.check()
    return [output.request_id for output in outputs if isinstance(output, PooledOutput)]


def test_steps_are_filled_up_to_the_token_budget() -> None:
    scheduler = make()
    for number in range(5):
        add(scheduler, f"{number}", 40, flow="batch")
    first = scheduler.schedule()
    assert names(first) == ["0", "1"]
    assert first.stats.step_tokens == 80
    assert scheduler.stats().running == 2
    assert scheduler.stats().waiting == 3
    assert finish(scheduler, first) == ["0", "1"]
    assert names(scheduler.schedule()) == ["2", "3"]


def test_a_request_longer_than_the_budget_runs_alone() -> None:
    scheduler = make()
    add(scheduler, "long", 900)
    assert names(scheduler.schedule()) == ["long"]


def test_the_number_of_sequences_is_limited() -> None:
    scheduler = make(max_seqs=3)
    for number in range(5):
        add(scheduler, f"{number}", 1)
    assert len(scheduler.schedule().encoder_requests) == 3


@pytest.mark.parametrize("running", [False, True])
def test_aborted_requests_are_not_answered(running: bool) -> None:
    scheduler = make()
    add(scheduler, "a", 10)
    add(scheduler, "b", 10)
    if running:
        plan = scheduler.schedule()
        scheduler.abort("a")
    else:
        scheduler.abort("a")
        plan = scheduler.schedule()
        assert names(plan) == ["b"]
    assert finish(scheduler, plan) == ["b"]
    assert not scheduler.has_work
    assert scheduler.schedule().is_empty


def test_a_failed_request_is_answered_with_its_error() -> None:
    scheduler = make()
    add(scheduler, "a", 10)
    add(scheduler, "b", 10)
    assert finish(scheduler, scheduler.schedule(), "a") == ["b"]
    assert not scheduler.has_work


def test_priorities_need_the_policy() -> None:
    for by_priority, expected in ((False, "long"), (True, "first")):
        scheduler = make(by_priority=by_priority)
        add(scheduler, "long", 80, priority=5)
        add(scheduler, "first", 90, priority=-5)
        assert names(scheduler.schedule()) == [expected]


def test_short_requests_of_other_flows_need_not_wait_for_a_step() -> None:
    scheduler = make()
    for number in range(4):
        add(scheduler, f"batch-{number}", 50, flow="batch")
    running = scheduler.schedule()
    assert scheduler.schedule_urgent([running]).is_empty  # of the same flow
    add(scheduler, "long", 65)
    assert scheduler.schedule_urgent([running]).is_empty
    scheduler.abort("long")
    add(scheduler, "one", 30)
    add(scheduler, "two", 30)
    add(scheduler, "three", 30)
    urgent = scheduler.schedule_urgent([running])
    assert names(urgent) == ["one", "two"]
    assert finish(scheduler, urgent) == ["one", "two"]
    assert finish(scheduler, running) == ["batch-0", "batch-1"]
    assert names(scheduler.schedule())[0] == "three"
