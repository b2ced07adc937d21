"""Memory for media is given in turns, waited for within bounds, and held as long as what it is for."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest

from quire.multimodal.errors import PromptError
from quire.multimodal.memory import MediaMemory, Reservation
from quire.workers.errors import QueueFull, ShareExceeded
from tests.support.server import until


def asked(memory: MediaMemory, size: int, tenant: str) -> asyncio.Task[Reservation]:
    return asyncio.create_task(memory.reserve(size, tenant))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_tenant_may_hold_its_share_and_waits_for_more_without_holding_others_up() -> None:
    memory = MediaMemory(1000, 0.75)
    first, second = await memory.reserve(500, "a"), await memory.reserve(250, "a")
    more = asked(memory, 100, "a")
    other = await memory.reserve(150, "b")
    await settled()
    assert not more.done()
    other.close()
    await settled()
    assert not more.done()  # there is room, but it has its share
    second.close()
    assert (await more).size == 100
    assert memory.held == 600
    first.close()


async def test_a_tenant_without_memory_is_not_overtaken_while_it_waits_for_what_others_hold() -> None:
    memory = MediaMemory(1000, 0.75)
    held = await memory.reserve(100, "a")
    large, small = asked(memory, 750, "b"), asked(memory, 10, "c")
    await settled()
    assert not large.done()  # while "a" holds something, its share is 675
    assert not small.done()
    held.close()
    (await large).close()
    assert (await small).size == 10


async def test_who_has_waited_in_vain_lets_others_have_their_turn() -> None:
    """A client whose large files never fit does not stop the others, however many of them it sends."""
    memory = MediaMemory(1000, patience=0.05)
    held = await memory.reserve(100, "a")
    first = asked(memory, 1000, "b")
    await settled()
    memory._patience = 60.0
    second, small = asked(memory, 1000, "b"), asked(memory, 10, "c")
    with pytest.raises(QueueFull):
        await first
    assert (await small).size == 10
    assert not second.done()
    held.close()
    second.cancel()


async def test_tenants_take_turns() -> None:
    memory = MediaMemory(100)
    held = await memory.reserve(100, "x")
    order: list[str] = []

    async def use(tenant: str, number: int) -> None:
        with await memory.reserve(100, tenant):
            order.append(f"{tenant}{number}")
            await settled()

    tasks = [asyncio.create_task(use(tenant, number)) for tenant in "ab" for number in range(3)]
    await settled()
    held.close()
    await asyncio.gather(*tasks)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert memory.held == 0


async def test_waiting_has_bounds_and_says_when_to_come_back() -> None:
    memory = MediaMemory(100, max_waiting=1, patience=0.01)
    held = await memory.reserve(100, "a")
    waiting = asked(memory, 50, "b")
    await settled()
    with pytest.raises(QueueFull, match="1 requests wait already"):
        await memory.reserve(50, "c")
    with pytest.raises(QueueFull, match="100 bytes of --max-media-memory 100 are taken") as refused:
        await waiting
    assert not isinstance(refused.value, ShareExceeded)
    assert refused.value.retry_after == 10
    assert memory.waiting == 0
    held.close()
    (await memory.reserve(50, "c")).close()


async def test_who_has_its_share_of_memory_or_of_places_to_wait_is_told_so() -> None:
    memory = MediaMemory(100, 0.75, max_waiting=4, patience=0.01)
    held = await memory.reserve(75, "a")
    waiting = [asked(memory, 5, "a") for _ in range(3)]
    await settled()
    with pytest.raises(ShareExceeded, match="3 requests of this client wait already"):
        await memory.reserve(5, "a")
    (await memory.reserve(5, "b")).close()
    with pytest.raises(ShareExceeded, match=r"hold 75 of the 75 bytes .*--max-client-share") as refused:
        await waiting[0]
    assert refused.value.retry_after == 10
    await asyncio.gather(*waiting, return_exceptions=True)
    held.close()


async def test_what_a_tenant_may_never_hold_is_refused() -> None:
    memory = MediaMemory(100, 0.75)
    with pytest.raises(PromptError, match=r"76 bytes .* this server has 100 .* one client may have 75"):
        await memory.reserve(76, "a")
    (await memory.reserve(75, "a")).close()


async def test_who_leaves_while_waiting_lets_others_go_on() -> None:
    memory = MediaMemory(100)
    held = await memory.reserve(50, "a")
    large, small = asked(memory, 100, "b"), asked(memory, 10, "c")
    await settled()
    large.cancel()
    assert (await small).size == 10
    held.close()
    assert memory.held == 10


async def test_memory_granted_to_somebody_who_has_just_left_is_given_back() -> None:
    memory = MediaMemory(100)
    held = await memory.reserve(100, "a")
    leaving = asked(memory, 100, "b")
    await settled()
    held.close()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert memory.held == 0


async def test_memory_is_held_as_long_as_the_object_lives() -> None:
    memory = MediaMemory(1000)
    array = np.zeros(10)
    with await memory.reserve(500, "a") as reservation:
        reservation.pass_on(array, 200)
        assert memory.held == 500
    assert memory.held == 200
    holders = [array]
    del array
    thread = threading.Thread(target=holders.clear)
    thread.start()
    thread.join()
    await until(lambda: gc.collect() >= 0 and memory.held == 0)


async def test_what_cannot_wait_leaves_room_for_those_who_do() -> None:
    memory = MediaMemory(1000)
    taken = memory.take(700, "a")
    with pytest.raises(QueueFull):
        memory.take(100, "b")
    (await memory.reserve(100, "b")).close()
    taken.close()


async def test_what_cannot_wait_has_a_share_like_all_else() -> None:
    memory = MediaMemory(1000, 0.2)
    taken = memory.take(150, "a")
    with pytest.raises(ShareExceeded, match="hold 150 of the 200 bytes"):
        taken.grow(60)
    taken.grow(50)
    memory.take(160, "b").close()
    taken.close()
    assert memory.held == 0


class Kept:
    """Something that holds memory, and can do without."""

    def __init__(self, memory: MediaMemory, size: int) -> None:
        self.reservation = memory.take(size, "a")
        memory.add_spare(self)

    def forget(self) -> None:
        self.reservation.close()


async def test_what_can_be_made_again_is_forgotten_before_anybody_waits() -> None:
    memory = MediaMemory(1000)
    spare = Kept(memory, 300)
    (await memory.reserve(700, "b")).close()
    assert memory.held == 300
    held = await memory.reserve(800, "a")
    assert memory.held == 800
    waiting = asked(memory, 300, "c")
    await settled()
    assert not memory.has_room(1, "d")  # as somebody waits
    held.close()
    (await waiting).close()
    memory.remove_spare(spare)
    spare = Kept(memory, 300)
    memory.take(700, "b").close()
    assert memory.held == 0
