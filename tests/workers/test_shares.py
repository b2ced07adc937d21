"""How a capacity is divided: most of it for one that is alone, room for one that comes later."""

from __future__ import annotations

import random

import pytest

from quire.workers.errors import QueueFull, ShareExceeded
from quire.workers.queue import Job, TenantQueue
from quire.workers.shares import Shares


def fill(shares: Shares, tenant: str) -> int:
    """Take as much as a tenant may have; returns how much that was."""
    count = 0
    while shares.refusal(tenant) is None:
        shares.take(tenant)
        count += 1
    return count


def test_who_is_alone_has_most_of_it_and_others_find_room() -> None:
    shares = Shares(64, 0.75)
    assert fill(shares, "a") == shares.most == 48
    assert shares.refusal("a") == "share"
    assert fill(shares, "b") == 12
    assert fill(shares, "c") == 3
    shares.give_back("a", 30)
    fill(shares, "b")
    assert shares.held("b") > shares.held("a") == 18  # which has had its turn
    assert shares.refusal("d") is None


@pytest.mark.parametrize(("capacity", "alone"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_small_capacities(capacity: int, alone: int) -> None:
    shares = Shares(capacity, 0.75)
    assert fill(shares, "a") == alone
    assert fill(shares, "b") == min(1, capacity - alone)
    assert shares.refusal("c") == "full"


def test_a_share_of_all_is_no_limit() -> None:
    shares = Shares(10, 1.0)
    assert fill(shares, "a") == 10
    assert shares.refusal("a") == "full"


def test_what_is_held_adds_up() -> None:
    shares, held, choices = Shares(100, 0.6), dict[str, int](), random.Random(1)
    for _ in range(5000):
        tenant, count = choices.choice("abcd"), choices.randrange(1, 20)
        if choices.random() < 0.5 and held.get(tenant, 0) >= count:
            shares.give_back(tenant, count)
            held[tenant] -= count
        elif shares.refusal(tenant, count) is None:
            shares.take(tenant, count)
            held[tenant] = held.get(tenant, 0) + count
        assert shares.used == sum(held.values()) <= 100
        assert all(shares.held(name) == number for name, number in held.items())


async def test_one_tenant_does_not_fill_a_queue() -> None:
    queue = TenantQueue(8, 0.75)
    for _ in range(6):
        queue.put(Job(None, "a"))
    with pytest.raises(ShareExceeded):
        queue.put(Job(None, "a"))
    queue.put(Job(None, "b"))
    assert (len(queue), queue.get_nowait().tenant) == (7, "a")  # type: ignore[union-attr]
    queue.put(Job(None, "c"))
    queue.put(Job(None, "d"))
    with pytest.raises(QueueFull) as refused:
        queue.put(Job(None, "e"))
    assert not isinstance(refused.value, ShareExceeded)
