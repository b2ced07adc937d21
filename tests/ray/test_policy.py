from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.ray.policy import HeldBlocks, Load, ranked


def test_the_holder_of_the_prefix_comes_first() -> None:
    loads = {"a": Load(), "b": Load(), "c": Load()}

    assert ranked(20, {"b": 15}, loads, 1.0) == ["b", "a", "c"]


def test_work_under_way_counts_against_the_holder() -> None:
    loads = {"holder": Load(queued=16), "other": Load()}

    assert ranked(20, {"holder": 15}, loads, 1.0)[0] == "other"


def test_running_requests_count_by_their_cost() -> None:
    loads = {"holder": Load(requests=4), "other": Load()}

    assert ranked(20, {"holder": 15}, loads, 3.0)[0] == "holder"
    assert ranked(20, {"holder": 15}, loads, 4.0)[0] == "other"


def test_among_equals_the_replica_with_fewer_requests_comes_first() -> None:
    loads = {"busy": Load(requests=2), "idle": Load(queued=2.0)}

    assert ranked(8, {}, loads, 1.0) == ["idle", "busy"]


def test_of_idle_replicas_the_one_that_was_given_less_comes_first() -> None:
    loads = {"full": Load(given=500), "empty": Load()}

    assert ranked(8, {}, loads, 1.0) == ["empty", "full"]


def test_a_prompt_is_held_up_to_its_first_missing_block() -> None:
    held = HeldBlocks(10)
    held.use([1, 2, 3])

    assert held.leading([1, 2, 3, 4]) == 3
    assert held.leading([1, 9, 3]) == 1
    assert held.leading([9]) == 0


def test_the_end_of_the_oldest_prompt_is_evicted_first() -> None:
    held = HeldBlocks(4)
    held.use([1, 2, 3])

    assert held.use([7, 8]) == [3]
    assert held.leading([1, 2, 3]) == 2
    assert held.use([1, 9]) == [2]


@given(st.lists(st.lists(st.integers(0, 30), max_size=12, unique=True), max_size=30), st.integers(1, 8))
def test_the_bound_holds_and_evictions_are_complete(prompts: list[list[int]], capacity: int) -> None:
    held = HeldBlocks(capacity)
    present: set[int] = set()

    for prompt in prompts:
        evicted = held.use(prompt)
        present |= set(prompt[:capacity])
        present -= set(evicted)
        assert {block for block in range(31) if block in held} == present
        assert len(held) <= capacity
        assert held.leading(prompt[:capacity]) == len(prompt[:capacity])


def test_what_a_replica_reports_is_held_after_what_was_used() -> None:
    held = HeldBlocks(3)
    held.use([1, 2])
    held.note([2, 5])

    assert held.leading([5]) == 1
    assert held.recent(2) == [5, 1]
