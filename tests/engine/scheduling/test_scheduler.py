"""Scheduler: token budgets, progress of every request, prefix cache, preemption and consistent state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.client.protocol import AddRequest, TokensOutput
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.scheduling import pipeline
from quire.engine.scheduling.blocks import BlockPool, hasher_named
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import SampledTokens, ScheduledSequence, StepPlan, StepResult
from quire.engine.scheduling.scheduler import Scheduler

BLOCK = 4


def make(
    blocks: int = 64,
    *,
    seqs: int = 8,
    tokens: int = 64,
    length: int = 64,
    caching: bool = True,
    by_priority: bool = False,
    draft: int = 0,
    rope_switch: int | None = None,
    stages: int = 1,
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=min(length, blocks * BLOCK),
        max_draft=draft,
        rope_switch=rope_switch,
        stages=stages,
    )
    hasher = hasher_named("sha256") if caching else None
    return Scheduler(limits, BlockPool(blocks, BLOCK), hasher=hasher, by_priority=by_priority)


def request(name: str, prompt: Iterable[int], max_tokens: int = 4, **fields: object) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return AddRequest(name, np.array(list(prompt), np.int32), params, **fields)  # type: ignore[arg-type]


class FakeRunner:
    """Stands in for the model runner: applies all plans and asserts that they are valid.

    With several stages the result of a step is known when as many steps are in flight, or no other can be planned.
    """

    def __init__(self, scheduler: Scheduler, *, varied: bool = True) -> None:
        """`varied`: the model's tokens are hard to predict for a drafter."""
        self.scheduler = scheduler
        self.varied = varied
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        # Block -> whether its keys are those of a long sequence, and all tokens up to its end when it was written.
        self.written: dict[int, tuple[bool, tuple[int, ...]]] = {}
        self.extended: dict[str, bool] = {}
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for name in plan.removed:
            del self.tables[name]
        for new in plan.new:
            assert new.request_id not in self.tables
            self.tables[new.request_id] = []
            self.tokens[new.request_id] = list(new.tokens)
            self.extended[new.request_id] = new.uses_long_rope
        limits = self.scheduler.limits
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len(plan.scheduled) <= limits.max_num_seqs
        assert len({item.request_id for item in plan.scheduled}) == len(plan.scheduled)
        for item in plan.scheduled:
            self._apply(item)
        sampled = [SampledTokens(item.request_id, self._sample(item)) for item in plan.scheduled if item.samples]
        awaited = {item.request_id for before, _ in self.in_flight for item in before.scheduled if item.samples}
        assert awaited.isdisjoint(item.request_id for item in plan.scheduled)
        if not plan.is_empty or not self.in_flight:
            self.in_flight.append((plan, StepResult(sampled)))
        if len(self.in_flight) == limits.stages or plan.is_empty:
            self.finish()
        self.scheduler.check()
        return plan

    def finish(self) -> None:
        """Give the scheduler the result of the oldest step."""
        for output in self.scheduler.update(*self.in_flight.popleft()):
            assert isinstance(output, TokensOutput)
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                return
            self.step()
        pytest.fail("requests do not finish")

    def next_of(self, tokens: list[int]) -> int:
        """The model's next token."""
        return sum(tokens) % 7 if self.varied else tokens[-1] % 2

    def _sample(self, item: ScheduledSequence) -> list[int]:
        """The model's tokens, up to the first that differs from the draft."""
        tokens = list(self.tokens[item.request_id])
        out = []
        for drafted in (*item.draft, None):
            out.append(self.next_of(tokens))
            tokens.append(out[-1])
            if out[-1] != drafted:
                break
        return out

    def _apply(self, item: ScheduledSequence) -> None:
        tokens, table = self.tokens[item.request_id], self.tables[item.request_id]
        table += item.new_blocks
        end = item.start + item.count - len(item.draft)
        assert end > item.start
        assert end <= len(tokens)
        assert item.samples == (end == len(tokens))
        assert item.samples or not item.draft
        assert len(table) * BLOCK >= end + len(item.draft)
        assert len(table) <= -(-end // BLOCK) + self.scheduler.limits.max_draft
        extended, switch = self.extended[item.request_id], self.scheduler.limits.rope_switch
        assert extended == (switch is not None and len(tokens) > switch)
        assert extended or switch is None or item.start + item.count <= switch
        for position in range(item.start):  # computed positions were written with the same tokens and the same rope
            found_extended, found = self.written[table[position // BLOCK]]
            assert (found_extended, found[: position + 1]) == (extended, tuple(tokens[: position + 1]))
        written = [*tokens, *item.draft]
        for position in range(item.start, item.start + item.count):
            self.written[table[position // BLOCK]] = extended, tuple(written[: position + 1])


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
ARRIVALS = st.lists(
    st.tuples(PROMPTS, st.integers(1, 12), st.integers(0, 5), st.integers(-2, 2), st.sampled_from([None, "s"])),
    min_size=1,
    max_size=12,
)


@given(
    arrivals=ARRIVALS,
    blocks=st.integers(16, 40),
    seqs=st.integers(1, 6),
    tokens=st.integers(6, 50),
    caching=st.booleans(),
    by_priority=st.booleans(),
    draft=st.sampled_from([0, 1, 6]),
    rope_switch=st.sampled_from([None, 10, 25]),
    stages=st.sampled_from([1, 1, 2, 3]),
    least=st.sampled_from([1, 2, 8]),
    varied=st.booleans(),
    aborts=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 30)), max_size=4),
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
    rope_switch: int | None,
    stages: int,
    least: int,
    varied: bool,
    aborts: list[tuple[int, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_LEAST", least)
        run_arrivals(arrivals, blocks, seqs, tokens, caching, by_priority, draft, rope_switch, stages, varied, aborts)


def run_arrivals(
    arrivals: list[tuple[list[int], int, int, int, str | None]],
    blocks: int,
    seqs: int,
    tokens: int,
    caching: bool,
    by_priority: bool,
    draft: int,
    rope_switch: int | None,
    stages: int,
    varied: bool,
    aborts: list[tuple[int, int]],
) -> None:
    scheduler = make(
        blocks,
        seqs=seqs,
        tokens=tokens,
        length=60,
        caching=caching,
        by_priority=by_priority,
        draft=draft,
        rope_switch=rope_switch,
        stages=stages,
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
