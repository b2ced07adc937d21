"""The fair queue: every flow of requests gets an equal share of the tokens."""

from __future__ import annotations

from quire.engine.scheduling.fair_queue import FairQueue


def drain(queue: FairQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_a_single_request_does_not_wait_for_another_flows_batch() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.push(f"batch-{number}", "batch", 50)
    served = [queue.pop() for _ in range(10)]
    queue.push("single", "single", 20)
    assert queue.pop() == "single"
    assert served + drain(queue) == [f"batch-{number}" for number in range(100)]


def test_two_batches_share_by_tokens() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(10):
        queue.push(f"long-{number}", "a", 90)
    for number in range(30):
        queue.push(f"short-{number}", "b", 30)
    first = [queue.pop() for _ in range(20)]
    assert sum(name.startswith("long") for name in first) == 5
    assert sum(name.startswith("short") for name in first) == 15


def test_a_flow_that_was_served_alone_has_no_debt() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(50):
        queue.push(f"early-{number}", "early", 100)
        queue.pop()
    queue.push("early-last", "early", 10)
    queue.push("new", "new", 30)
    assert drain(queue) == ["early-last", "new"]


def test_priorities_come_first() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("late", "a", 1, priority=1)
    queue.push("soon", "b", 1000, priority=0)
    assert queue.peek() == "soon"
    assert drain(queue) == ["soon", "late"]
    assert queue.peek() is None


def test_idle_flows_are_forgotten() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(1000):
        queue.push("x", f"flow-{number}", 5)
        queue.pop()
    assert len(queue._clock) < 100
