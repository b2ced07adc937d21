"""Scheduler: token budgets, progress of every request, prefix cache, preemption and consistent state."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.scheduling import pipeline, snapshot_borders
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import SampledTokens, StepResult
from quire.engine.scheduling.state_snapshots import SnapshotStore
from tests.support.scheduling import FakeRunner, make, request

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
ARRIVALS = st.lists(
    st.tuples(PROMPTS, st.integers(1, 12), st.integers(0, 5), st.integers(-2, 2), st.sampled_from([None, "s"])),
    min_size=1,
    max_size=12,
)


GROUPS = [
    BlockGroups(),
    BlockGroups((None, 5, 5)),
    BlockGroups((9,)),
    BlockGroups((4, None, 1)),
    BlockGroups((None,), has_states=True),
    BlockGroups((9, None), has_states=True),
    BlockGroups((), has_states=True),
]
SNAPSHOTS = st.sampled_from([None, SnapshotStore(1, 8), SnapshotStore(3, 8), SnapshotStore(100, 8, answer_blocks=2)])


@given(
    arrivals=ARRIVALS,
    blocks=st.integers(64, 100),
    seqs=st.integers(1, 6),
    tokens=st.integers(6, 50),
    caching=st.booleans(),
    by_priority=st.booleans(),
    draft=st.sampled_from([0, 1, 6]),
    further=st.sampled_from([0, 1, 7]),
    rope_switch=st.sampled_from([None, 10, 25]),
    stages=st.sampled_from([1, 1, 2, 3]),
    least=st.sampled_from([1, 2, 8]),
    varied=st.booleans(),
    groups=st.sampled_from(GROUPS),
    aborts=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 30)), max_size=4),
    snapshots=SNAPSHOTS,
)
@settings(max_examples=200, deadline=None)
def test_all_requests_finish_and_state_is_consistent(
    arrivals: list[tuple[list[int], int, int, int, str | None]],
    blocks: int,
    seqs: int,
    tokens: int,
    caching: bool,
    by_priority: bool,
    draft: int,
    further: int,
    rope_switch: int | None,
    stages: int,
    least: int,
    varied: bool,
    groups: BlockGroups,
    aborts: list[tuple[int, int]],
    snapshots: SnapshotStore | None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_LEAST", least)
        patch.setattr(snapshot_borders, "_LEAST", least)
        run_arrivals(
            *(
                arrivals,
                blocks,
                seqs,
                tokens,
                caching,
                by_priority,
                draft,
                further,
                rope_switch,
                stages,
                varied,
                groups,
                aborts,
            ),
            snapshots,
        )


def run_arrivals(
    arrivals: list[tuple[list[int], int, int, int, str | None]],
    blocks: int,
    seqs: int,
    tokens: int,
    caching: bool,
    by_priority: bool,
    draft: int,
    further: int,
    rope_switch: int | None,
    stages: int,
    varied: bool,
    groups: BlockGroups,
    aborts: list[tuple[int, int]],
    snapshots: SnapshotStore | None,
) -> None:
    if groups.has_states and stages > 1:
        draft = 0  # as the engine does
    if draft or stages > 1:
        further = 0  # as the engine does
    if len(groups.windows) == 1:
        blocks = blocks - 48
    scheduler = make(
        blocks,
        seqs=seqs,
        tokens=tokens,
        length=60,
        caching=caching,
        by_priority=by_priority,
        draft=draft,
        further=further,
        rope_switch=rope_switch,
        stages=stages,
        groups=groups,
        snapshots=snapshots,
    )
    runner = FakeRunner(scheduler, varied=varied)
    aborted = set()
    step = 0
    waiting = sorted(enumerate(arrivals), key=lambda item: item[1][2])
    while waiting or scheduler.has_work or runner.in_flight:
        while waiting and waiting[0][1][2] <= step:
            index, (prompt, max_tokens, _, priority, salt) = waiting.pop(0)
            scheduler.add(request(f"r{index}", prompt, max_tokens, priority=priority, cache_salt=salt))
        for index, when in aborts:
            if when == step:
                if f"r{index}" in scheduler:
                    aborted.add(f"r{index}")
                scheduler.abort(f"r{index}")
        scheduler.check()
        if scheduler.has_work or runner.in_flight:
            runner.step()
        step += 1
        assert step < 3000
    assert scheduler.pool.num_used == 0
    for index, (prompt, max_tokens, *_) in enumerate(arrivals):
        if f"r{index}" not in aborted:
            assert runner.ended[f"r{index}"] == "length"
            expected = list(prompt)
            while len(expected) < min(len(prompt) + max_tokens, 60):
                expected.append(runner.next_of(expected))
            assert runner.tokens[f"r{index}"] == expected


@given(
    arrivals=ARRIVALS,
    poisoned=st.sets(st.integers(0, 11), max_size=3),
    blocks=st.integers(40, 80),
    seqs=st.integers(1, 6),
    tokens=st.integers(6, 50),
    by_priority=st.booleans(),
    draft=st.sampled_from([0, 6]),
    further=st.sampled_from([0, 5]),
    groups=st.sampled_from([groups for groups in GROUPS if groups.has_states]),
    snapshots=SNAPSHOTS,
)
@settings(max_examples=100, deadline=None)
def test_only_the_request_ends_that_steps_fail_for(
    arrivals: list[tuple[list[int], int, int, int, str | None]],
    poisoned: set[int],
    blocks: int,
    seqs: int,
    tokens: int,
    by_priority: bool,
    draft: int,
    further: int,
    groups: BlockGroups,
    snapshots: SnapshotStore | None,
) -> None:
    """The others of its steps are computed again, although their states are lost each time."""
    scheduler = make(
        blocks,
        seqs=seqs,
        tokens=tokens,
        length=60,
        by_priority=by_priority,
        draft=draft,
        further=0 if draft else further,
        groups=groups,
        snapshots=snapshots,
    )
    runner = FakeRunner(scheduler)
    runner.poisoned = {f"r{index}" for index in poisoned}
    waiting = sorted(enumerate(arrivals), key=lambda item: item[1][2])
    for step in range(3000):
        while waiting and waiting[0][1][2] <= step:
            index, (prompt, max_tokens, _, priority, salt) = waiting.pop(0)
            scheduler.add(request(f"r{index}", prompt, max_tokens, priority=priority, cache_salt=salt))
        if not waiting and not scheduler.has_work:
            break
        runner.step()
    for index, (prompt, max_tokens, *_) in enumerate(arrivals):
        assert runner.ended[f"r{index}"] == ("error" if index in poisoned else "length")
        if index not in poisoned:
            expected = list(prompt)
            while len(expected) < min(len(prompt) + max_tokens, 60):
                expected.append(runner.next_of(expected))
            assert runner.tokens[f"r{index}"] == expected


def test_a_lost_request_is_computed_alone_up_to_where_it_was() -> None:
    scheduler = make(groups=BlockGroups((None,), has_states=True))
    runner = FakeRunner(scheduler)
    for name in "abc":
        scheduler.add(request(name, range(9), 8))
    runner.step()
    runner.poisoned = {"b"}
    steps = [[item.request_id for item in runner.step().scheduled] for _ in range(4)]
    assert steps[0] == ["a", "b", "c"]
    assert all(len(names) == 1 for names in steps[1:])
    while scheduler.has_work:
        runner.step()
    assert runner.ended == {"a": "length", "b": "error", "c": "length"}
    assert runner.lost == 3, "only the first step has failed for several"


def test_further_steps_are_run_while_all_sequences_decode_and_no_request_waits() -> None:
    scheduler = make(seqs=2, further=7)
    runner = FakeRunner(scheduler)
    scheduler.add(request("a", range(9), 30))
    plans = [runner.step() for _ in range(2)]
    assert [plan.further_steps for plan in plans] == [0, 0], "nothing is known of the time that steps take"
    assert runner.step().further_steps == 7
    scheduler.add(request("b", range(9), 20))
    assert runner.step().further_steps == 0, "a prompt is computed"
    assert runner.step().further_steps == 7
    scheduler.add(request("c", range(9), 4))
    assert runner.step().further_steps == 0, "a request waits for a place"
    scheduler.abort("c")
    left = 30 - (len(runner.tokens["a"]) - 9)
    while "a" not in runner.ended:
        assert runner.step().further_steps <= 7
    runner.run()
    assert left > 0
    assert len(runner.tokens["a"]) == 9 + 30
    assert len(runner.tokens["b"]) == 9 + 20
    assert runner.further > 0


@pytest.mark.parametrize(("seconds", "expected"), [(0.001, 7), (0.016, 2), (0.031, 0), (1.0, 0)])
def test_tokens_of_an_output_take_no_more_than_60_ms(seconds: float, expected: int) -> None:
    """Seconds are those of a step."""
    scheduler = make(further=7)
    runner = FakeRunner(scheduler)
    scheduler.add(request("a", range(9), 30))
    runner.step()
    plan = scheduler.schedule()
    result = StepResult([SampledTokens("a", [1])])
    scheduler.update(plan, result)
    scheduler.run_ahead.measure(plan, result, seconds)
    assert scheduler.schedule().further_steps == expected


def test_further_steps_preempt_no_sequence() -> None:
    """With a block for each sequence left, there is room for the next token of each, and not for seven more."""
    scheduler = make(blocks=6, further=7)
    runner = FakeRunner(scheduler)
    for name in "ab":
        scheduler.add(request(name, range(7), 5))
    plans = [runner.step() for _ in range(3)]
    assert not any(plan.further_steps and plan.stats.preemptions for plan in plans)
    runner.run()
    assert {name: len(tokens) for name, tokens in runner.tokens.items()} == {"a": 12, "b": 12}


def test_a_long_prompt_leaves_budget_for_decoding_sequences() -> None:
    scheduler = make(tokens=8, seqs=4)
    runner = FakeRunner(scheduler)
    scheduler.add(request("first", range(3), 10))
    runner.step()
    scheduler.add(request("long", range(40), 10))
    for _ in range(5):
        plan = runner.step()
        assert {item.request_id: item.count for item in plan.scheduled} == {"first": 1, "long": 7}


def test_a_long_prompt_of_higher_priority_does_not_starve_decoding() -> None:
    scheduler = make(tokens=8, seqs=4, by_priority=True)
    runner = FakeRunner(scheduler)
    scheduler.add(request("late", range(3), 10, priority=5))
    runner.step()
    scheduler.add(request("urgent", range(40), 4, priority=-5))
    plan = runner.step()
    plan = runner.step()
    assert {item.request_id: item.count for item in plan.scheduled} == {"urgent": 7, "late": 1}


@pytest.mark.parametrize("stages", [2, 3])
def test_the_steps_of_all_stages_have_equal_parts_of_the_sequences(stages: int) -> None:
    """Also after others have entered, and with every sequence in turn."""
    scheduler = make(512, seqs=48, stages=stages)
    runner = FakeRunner(scheduler)
    for count in (24, 48):
        for index in range(count - 24, count):
            scheduler.add(request(f"r{index}", range(index % 5 + 1), 60))
        for _ in range(3 * stages):  # those that were in flight when the others came have other parts
            runner.step()
        plans = [runner.step() for _ in range(2 * stages)]
        assert {len(plan.scheduled) for plan in plans} == {count // stages}
        for first in range(stages + 1):
            turn = [item.request_id for plan in plans[first : first + stages] for item in plan.scheduled]
            assert len({*turn}) == count


def test_few_sequences_are_not_divided_among_steps() -> None:
    """They come together though they entered one after the other: a step with one takes as long as one with all."""
    scheduler = make(stages=2)
    runner = FakeRunner(scheduler)
    for index in range(4):
        scheduler.add(request(f"r{index}", range(3), 30))
        runner.step()
    for _ in range(4):
        runner.step()
    plans = [runner.step() for _ in range(6)]
    assert [len(plan.scheduled) for plan in plans] == [4, 0] * 3 or [len(plan.scheduled) for plan in plans] == [
        0,
        4,
    ] * 3


def test_a_prompt_is_computed_while_a_step_of_all_sequences_is() -> None:
    scheduler = make(stages=2)
    runner = FakeRunner(scheduler)
    scheduler.add(request("first", range(3), 30))
    runner.step()
    runner.step()
    assert [item.request_id for item in scheduler.schedule().scheduled] == ["first"]
    scheduler.add(request("second", range(3), 30))
    assert [item.request_id for item in scheduler.schedule().scheduled] == ["second"]


def test_chunks_of_a_prompt_are_in_flight_at_once() -> None:
    """The next chunk needs no token of the one before; the next token does."""
    scheduler = make(tokens=8, stages=3)
    scheduler.add(request("long", range(20)))
    plans = [scheduler.schedule() for _ in range(4)]
    assert [(item.start, item.count) for plan in plans for item in plan.scheduled] == [(0, 8), (8, 8), (16, 4)]
    assert plans[3].is_empty


def test_a_cached_prefix_is_not_recomputed() -> None:
    scheduler = make()
    runner = FakeRunner(scheduler)
    scheduler.add(request("one", range(20), 2))
    runner.run()
    scheduler.add(request("two", [*range(17), 99], 2))
    plan = runner.step()
    assert (plan.scheduled[0].start, plan.scheduled[0].count) == (16, 2)
    assert scheduler.stats(plan).prefix_hits == 16


def test_a_fully_cached_prompt_recomputes_its_last_block() -> None:
    scheduler = make()
    runner = FakeRunner(scheduler)
    for name in ("one", "two"):
        scheduler.add(request(name, range(16), 2))
        plan = runner.step()
        runner.run()
    assert plan.scheduled[0].start == 12


def test_requests_of_one_step_share_their_prefix() -> None:
    scheduler = make(tokens=64)
    runner = FakeRunner(scheduler)
    for name in ("one", "two", "three"):
        scheduler.add(request(name, [*range(16), ord(name[0])], 2))
    plan = runner.step()
    assert [item.count for item in plan.scheduled] == [17, 1, 1]


def test_prefixes_are_not_shared_between_salts() -> None:
    scheduler = make()
    runner = FakeRunner(scheduler)
    for name, salt in (("one", None), ("two", "salt"), ("three", "salt")):
        scheduler.add(request(name, range(20), 1, cache_salt=salt))
        plan = runner.step()
        runner.run()
        assert plan.scheduled[0].start == (16 if name == "three" else 0)


def test_sequences_on_both_sides_of_a_rope_switch_share_nothing() -> None:
    scheduler = make(rope_switch=24)
    runner = FakeRunner(scheduler)
    for name, length, start in (("one", 20, 0), ("long", 30, 0), ("longer", 34, 28), ("two", 20, 16)):
        scheduler.add(request(name, range(length), 1))
        plan = runner.step()
        runner.run()
        assert plan.scheduled[0].start == start


def test_a_sequence_that_outgrows_the_rope_switch_is_computed_again() -> None:
    scheduler = make(rope_switch=24, length=60)
    runner = FakeRunner(scheduler)
    scheduler.add(request("one", range(23), 4))
    spans = [[(item.start, item.count) for item in runner.step().scheduled] for _ in range(5)]
    assert spans == [[(0, 23)], [(23, 1)], [(0, 23)], [(23, 2)], [(25, 1)]]
    assert runner.ended == {"one": "length"}
    assert scheduler.stats().preemptions == 0


def test_without_prefix_caching_nothing_is_shared() -> None:
    scheduler = make(caching=False)
    runner = FakeRunner(scheduler)
    for name in ("one", "two"):
        scheduler.add(request(name, range(20), 1))
        assert runner.step().scheduled[0].start == 0


def test_the_last_sequence_is_preempted_and_resumed() -> None:
    scheduler = make(blocks=10, seqs=2, length=40)
    runner = FakeRunner(scheduler)
    scheduler.add(request("one", range(16), 20))
    scheduler.add(request("two", range(100, 116), 20))
    two, preempted = scheduler._requests["two"], 0
    while scheduler.has_work:
        plan = runner.step()
        preempted += len([name for name in plan.removed if name == "two"]) if "two" in scheduler else 0
    assert preempted >= 1
    assert two.preemptions == preempted
    assert runner.ended == {"one": "length", "two": "length"}
    assert len(runner.tokens["two"]) == 36


def test_requests_run_in_order_of_priority() -> None:
    scheduler = make(seqs=1, by_priority=True)
    runner = FakeRunner(scheduler)
    for name, priority in (("a", 3), ("b", 1), ("c", 2)):
        scheduler.add(request(name, range(5), 2, priority=priority))
    runner.run()
    assert list(runner.ended) == ["b", "c", "a"]


def test_requests_run_in_order_of_arrival_without_priority() -> None:
    scheduler = make(seqs=1)
    runner = FakeRunner(scheduler)
    for name, priority in (("a", 3), ("b", 1), ("c", 2)):
        scheduler.add(request(name, range(5), 2, priority=priority))
    runner.run()
    assert list(runner.ended) == ["a", "b", "c"]


def test_aborted_requests_do_not_accumulate_in_the_queue() -> None:
    scheduler = make(seqs=1)
    runner = FakeRunner(scheduler)
    scheduler.add(request("runs", range(5), 40))
    runner.step()
    scheduler.add(request("waits", range(9), 4))
    for index in range(300):
        scheduler.add(request(f"r{index}", range(30)))
        scheduler.abort(f"r{index}")
        scheduler.check()
        assert len(scheduler._waiting) < 5
    runner.run()
    assert runner.ended == {"runs": "length", "waits": "length"}


def test_a_token_budget_below_max_seqs_is_rejected() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens must be at least max_num_seqs"):
        SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=4, max_model_len=10)
