"""The simulation of dispatch policies: its parts do what its pages say."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.routing import BLOCK, POLICIES, Costs, Index, Outcome, Policy, Shape, Trace, simulate

_REPLICAS = 5
_EVENT = st.tuples(st.booleans(), st.integers(0, _REPLICAS - 1), st.lists(st.integers(0, 9), max_size=6))


@given(st.lists(_EVENT, max_size=30), st.lists(st.integers(0, 9), max_size=6))
def test_the_index_is_what_its_events_say(events: list[tuple[bool, int, list[int]]], prompt: list[int]) -> None:
    index = Index(_REPLICAS)
    held: list[set[int]] = [set() for _ in range(_REPLICAS)]
    for stores, replica, blocks in events:
        if stores:
            index.store(replica, blocks)
            held[replica] |= set(blocks)
        else:
            index.remove(replica, blocks)
            held[replica] -= set(blocks)

    leading = [next((i for i, block in enumerate(prompt) if block not in own), len(prompt)) for own in held]
    assert index.leading(prompt).tolist() == leading


def test_a_turn_begins_with_the_full_blocks_of_the_one_before() -> None:
    trace = Trace(Shape(more_turns=1.0), 0.5, 1000.0, seed=3)
    for request in list(trace.first_turns())[:20]:
        following = trace.next_turn(request, request.arrival)
        if following is not None:
            assert following.blocks[: len(request.blocks)] == request.blocks
            assert following.arrival > request.arrival
            assert len(following.blocks) == following.tokens // BLOCK


def _run(policy: Policy, *, cache_tokens: int = 400_000) -> Outcome:
    return simulate(6, policy, Shape(), replace(Costs(), cache_tokens=cache_tokens), 0.25, 90.0)


def test_policies_are_in_the_order_that_one_expects() -> None:
    by_name = {policy.name: _run(policy) for policy in POLICIES[:3]}
    blind, least, aware = by_name.values()

    assert aware.hit_rate > 1.5 * max(blind.hit_rate, least.hit_rate)
    assert aware.ttft_p50 < least.ttft_p50 < blind.ttft_p50


def test_a_run_repeats() -> None:
    first, second = _run(POLICIES[4]), _run(POLICIES[4])

    assert replace(first, microseconds=0.0) == replace(second, microseconds=0.0)


def test_a_smaller_cache_hits_less() -> None:
    assert _run(POLICIES[2], cache_tokens=20_000).hit_rate < _run(POLICIES[2]).hit_rate
