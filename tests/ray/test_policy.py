from __future__ import annotations

from quire.ray.policy import Load, ranked


def test_the_holder_of_the_prefix_comes_first() -> None:
    loads = {"a": Load(), "b": Load(), "c": Load()}

    assert ranked(20, {"b": 15}, loads, 1.0) == ["b", "a", "c"]


def test_running_requests_count_by_their_cost() -> None:
    loads = {"holder": Load(requests=4), "other": Load()}

    assert ranked(20, {"holder": 15}, loads, 7.0)[0] == "holder"  # 2 * 5 + 4 * 7 < 2 * 20
    assert ranked(20, {"holder": 15}, loads, 8.0)[0] == "other"


def test_among_equals_the_replica_with_fewer_requests_comes_first() -> None:
    loads = {"busy": Load(requests=2), "idle": Load()}

    assert ranked(8, {"idle": 0, "busy": 1}, loads, 1.0) == ["idle", "busy"]


def test_of_idle_replicas_the_one_that_was_given_less_comes_first() -> None:
    loads = {"full": Load(given=500), "empty": Load()}

    assert ranked(8, {}, loads, 1.0) == ["empty", "full"]
