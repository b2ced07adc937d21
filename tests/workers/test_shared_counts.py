"""Counts that processes share: they are those of one process, and survive the death of any of them."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator

import pytest

from quire.api.http.key_usage import KeyUsage, Limits, UsageRecord
from quire.workers.shared_counts import SharedCounts, SharedShares
from quire.workers.shares import Shares


def in_a_copy(body: Callable[[], None]) -> int:
    """Run a function in a fork of this process; returns its exit code."""
    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


@pytest.fixture
def counts() -> Iterator[SharedCounts]:
    made = SharedCounts(processes=2, tables=2)
    yield made
    made.close()


def both(counts: SharedCounts, capacity: int, share: float) -> list[SharedShares]:
    """The shares as two processes see them."""
    views = []
    for index in range(2):
        view = counts.shares(0, capacity, share)
        view._shared = _At(counts, index)  # type: ignore[assignment]  # as if it was another process
        views.append(view)
    return views


class _At:
    """Shared counts in a process with a number."""

    def __init__(self, counts: SharedCounts, index: int) -> None:
        self.index, self.locked = index, counts.locked


def test_two_processes_count_as_one_does(counts: SharedCounts) -> None:
    first, second = both(counts, 100, 0.6)
    one, choices = Shares(100, 0.6), random.Random(1)
    held = {(view, tenant): 0 for view in (first, second) for tenant in "abcd"}
    for _ in range(3000):
        view, tenant, count = choices.choice((first, second)), choices.choice("abcd"), choices.randrange(1, 20)
        if choices.random() < 0.5 and held[view, tenant] >= count:
            view.give_back(tenant, count)
            one.give_back(tenant, count)
            held[view, tenant] -= count
        else:
            refusal = view.take_if_free(tenant, count)
            assert refusal == one.take_if_free(tenant, count)
            held[view, tenant] += 0 if refusal else count
        assert first.used == second.used == one.used <= 100
        assert all(view.held(name) == one.held(name) for view in (first, second) for name in "abcd")
        assert first.used_here + second.used_here == one.used


def test_more_tenants_than_rows_never_hold_more_than_there_is(counts: SharedCounts) -> None:
    (first, second) = both(counts, 10_000, 1.0)
    for number in range(10_000):
        assert (first, second)[number % 2].take_if_free(f"tenant {number}") is None
    assert first.take_if_free("another one") == "full"
    for number in range(10_000):
        (first, second)[number % 2].give_back(f"tenant {number}")
    assert first.used == 0
    assert first.take_if_free("another one", 10_000) is None


def test_what_a_process_has_counted_is_forgotten_when_it_is_killed_wherever_it_is(counts: SharedCounts) -> None:
    slots = counts.shares(0, 10, 1.0)
    slots.take("a", 2)

    def dies_with_the_lock() -> None:
        counts.use(1)
        counts.shares(0, 10, 1.0).take("a", 3)
        counts.shares(1, 10, 1.0).take("b", 4)
        with counts.locked():
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_copy(dies_with_the_lock) == -signal.SIGKILL
    assert slots.held("a") == slots.used == 5
    assert counts.shares(1, 10, 1.0).used == 4
    counts.clear(1)
    assert slots.held("a") == slots.used == slots.used_here == 2
    assert counts.shares(1, 10, 1.0).used == 0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def usages(counts: SharedCounts, limits: Limits, clock: Clock) -> list[KeyUsage]:
    """What a key uses as two processes see it."""
    record = counts.record("key")
    return [
        KeyUsage(
            limits, clock, UsageRecord(record.numbers[:3], record.numbers[3:], record.counts, index, counts.locked)
        )
        for index in range(2)
    ]


def test_the_limits_of_a_key_hold_in_all_processes_together(counts: SharedCounts) -> None:
    clock = Clock()
    limits = Limits(requests_per_minute=6, tokens_per_minute=600, max_concurrent_requests=2)
    first, second = usages(counts, limits, clock)
    assert first.begin() is None
    assert second.begin() is None
    refused = first.begin()
    assert refused is not None
    assert refused.reason == "concurrency"
    second.end()
    assert first.begin() is None
    assert second.headers()["x-ratelimit-remaining-requests"] == "3"
    first.end()
    first.end()
    second.use_tokens(700)
    refused = first.begin()
    assert refused is not None
    assert refused.reason == "tokens"
    assert refused.seconds == pytest.approx(10.1)
    clock.now += 11
    assert first.begin() is None


def test_new_limits_count_what_was_used_although_processes_learn_of_them_one_after_the_other(
    counts: SharedCounts,
) -> None:
    clock = Clock()
    first, second = usages(counts, Limits(requests_per_minute=10), clock)
    for usage in (first, second, first, second):
        assert usage.begin() is None
    first.set_limits(Limits(requests_per_minute=5))
    assert second.headers()["x-ratelimit-remaining-requests"] == "6"
    second.set_limits(Limits(requests_per_minute=5))
    assert {usage.headers()["x-ratelimit-remaining-requests"] for usage in (first, second)} == {"1"}
