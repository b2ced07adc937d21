"""What several front ends know together of replicas: processes are stood in for by copies with other numbers."""

from __future__ import annotations

import asyncio
import random
import sys

import pytest

from quire.engine.client.replicas.prefix_index import Prefixes, PrefixIndex
from quire.engine.client.replicas.shared_dispatch import SharedDispatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux'")


def keys_of(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(count)]


def test_each_sees_the_load_that_the_others_have_sent_and_that_of_the_dead_is_cleared() -> None:
    shared = SharedDispatch(2)
    first = shared.load(3)
    shared.use(1)
    second, other = shared.load(3), shared.load(4)
    work = first.begin(100, 20)
    second.begin(10, 5)
    assert (first.tokens, first.requests) == (second.tokens, second.requests) == (135, 2)
    assert (other.tokens, other.requests) == (0, 0)
    work.advance(1)
    assert second.tokens == 34
    shared.clear(1)
    assert (first.tokens, first.requests) == (19, 1)
    shared.load(3)  # of the next process with this number
    work.end()
    assert (second.tokens, second.requests) == (0, 0)


async def test_an_operation_of_one_is_waited_for_by_all() -> None:
    shared = SharedDispatch(2)
    here = shared.operations()
    shared.use(1)
    there = shared.operations()
    with here.running():
        waiting = asyncio.create_task(there.end())
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting
    with here.running():
        shared.clear(0)  # it has died
        await there.end()


def test_prompts_that_one_has_sent_are_found_by_all_and_those_of_other_replicas_are_not() -> None:
    shared, rng = SharedDispatch(2), random.Random(0)
    here, there, another = shared.prefixes(0, 4096), shared.prefixes(0, 4096), shared.prefixes(1, 4096)
    prompt = keys_of(rng, 1000)
    here.add(prompt)
    assert there.matched(prompt) == 1000
    assert there.matched([*prompt[:70], 5, *prompt[71:]]) == 70
    assert there.matched([]) == another.matched(prompt) == 0
    here.clear()
    assert there.matched(prompt) == 0


@pytest.mark.parametrize("capacity", [1, 64, 3000])
def test_as_many_blocks_are_known_as_the_cache_has_and_the_least_recent_leave(capacity: int) -> None:
    shared, rng = SharedDispatch(1), random.Random(capacity)
    table = shared.prefixes(0, capacity)
    exact: Prefixes = PrefixIndex(capacity)
    prompts = [keys_of(rng, rng.randrange(1, 40)) for _ in range(12 * capacity // 20 + 2)]
    for prompt in prompts:
        for index in (table, exact):
            index.add(prompt)
    blocks = [(table.matched(prompt), exact.matched(prompt), len(prompt)) for prompt in prompts]
    assert sum(known for known, _, _ in blocks) <= capacity + capacity / 16 + 40
    assert blocks[-1][0] == min(blocks[-1][2], capacity)
    if capacity >= 64:
        same = sum(min(known, right) for known, right, _ in blocks)
        assert same >= 0.9 * sum(right for _, right, _ in blocks)
