"""Traces of chats over a scheduler whose model has states: what is computed again, and that memory stays bounded."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from quire.engine.client.protocol import AddRequest, TokensOutput
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.blocks import BlockPool, hasher_named
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import SampledTokens, StepResult
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.state_snapshots import SnapshotStore
from tests.support.scheduling import FakeRunner, make, request

END = 100  # the token behind each message
ASSISTANT = [101, 102]  # in front of an answer


class Trace:
    """Requests one after the other; counts the tokens of prompts that are computed, and the fewest possible."""

    def __init__(self, places: int = 400, groups: BlockGroups | None = None) -> None:
        self.scheduler = Scheduler(
            SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=20_000),
            BlockPool(8000, 16),
            groups or BlockGroups((None,), has_states=True),
            hasher=hasher_named("xxhash"),
            snapshots=SnapshotStore(places, 1000),
        )
        self.computed = self.least = self.steps = 0
        self.lost: dict[str, int] = {}
        self._before: list[np.ndarray] = []
        self._random = random.Random(1)

    def words(self, count: int) -> list[int]:
        return [self._random.randrange(100) for _ in range(count)]

    def send(
        self, prompt: Sequence[int], answer: Sequence[int], ends: Sequence[int] | None = None, next_turn: int = 0
    ) -> None:
        """Send a prompt, and sample the answer. `ends`: where messages end; None: behind END."""
        tokens = np.array(prompt, np.int32)
        shared = max((_common(tokens, other) for other in self._before), default=0)
        self.least += len(prompt) - min(shared, len(prompt) - 1)
        self._before.append(np.array([*prompt, *answer[:-1]], np.int32))
        params = SamplingParams(max_tokens=len(answer), eos_token_ids=(END,))
        message_ends = None if ends is None else np.array(ends, np.int32)
        self.scheduler.add(AddRequest("r", tokens, params, message_ends=message_ends, next_turn=next_turn))
        left = list(reversed(answer))
        while self.scheduler.has_work:
            plan = self.scheduler.schedule()
            sampled = []
            for item in plan.scheduled:
                self.computed += max(0, min(item.start + item.count, len(prompt)) - item.start)
                self.steps += item.start < len(prompt)
                sampled += [SampledTokens("r", [left.pop()])] if item.samples else []
            outputs = self.scheduler.update(plan, StepResult(sampled))
            assert all(isinstance(output, TokensOutput) for output in outputs)
            for reason, count in self.scheduler.stats(plan).lost_tokens.items():
                self.lost[reason] = self.lost.get(reason, 0) + count
        self.scheduler.check()

    def check_ratio(self, name: str) -> None:
        ratio = self.computed / self.least
        print(f"{name}: {self.computed} tokens computed, {self.least} at least: {ratio:.3f}; {self.steps} steps")
        assert ratio <= 1.2


def _common(tokens: np.ndarray, other: np.ndarray) -> int:
    length = min(len(tokens), len(other))
    differs = (tokens[:length] != other[:length]).nonzero()[0]
    return int(differs[0]) if len(differs) else length


def chat(trace: Trace, history: list[int], turns: int) -> list[list[int]]:
    """Go on with a chat whose reasoning the template drops; returns the history before each turn."""
    histories = []
    for _ in range(turns):
        histories.append(list(history))
        history += [*trace.words(120), END]
        content = [*trace.words(150), END]
        trace.send([*history, *ASSISTANT], [103, *trace.words(200), 104, *content])
        history += [*ASSISTANT, *content]
    return histories


GROUPS = [BlockGroups((None,), has_states=True), BlockGroups((None, 100), has_states=True), BlockGroups((), True)]


@pytest.mark.parametrize("groups", GROUPS)
def test_a_chat_whose_reasoning_is_dropped(groups: BlockGroups) -> None:
    trace = Trace(groups=groups)
    chat(trace, [*trace.words(400), END], 12)
    trace.check_ratio("12 turns")
    assert "template_changed" not in trace.lost


def test_agents_with_a_system_prompt_and_different_tools() -> None:
    trace = Trace()
    system = trace.words(4000)
    for _ in range(20):
        chat(trace, [*system, *trace.words(trace._random.randrange(200, 600)), END], 1)
    trace.check_ratio("20 agents")


def test_an_edit_in_the_middle_of_a_chat() -> None:
    trace = Trace()
    histories = chat(trace, [*trace.words(400), END], 12)
    chat(trace, histories[6], 6)
    trace.check_ratio("an edit in the middle")


def test_messages_end_where_the_renderer_says() -> None:
    """Neither the system prompt nor the user's message ends with a token that ends answers."""
    trace = Trace()
    system, tools = trace.words(4000), [trace.words(300) for _ in range(3)]
    for index, text in enumerate(tools):
        prompt = [*system, *text, *trace.words(120)]
        trace.send([*prompt, *ASSISTANT], [103, *trace.words(200)], [4000, len(prompt)], len(prompt) + 2)
        assert trace.lost == {}, f"agent {index}"
        trace.send([*prompt, *ASSISTANT, *trace.words(40)], [END], [4000, len(prompt), len(prompt) + 42])
    trace.check_ratio("3 agents")
    assert "template_changed" not in trace.lost
    assert trace.lost.get("no_snapshot", 0) < 3 * 32


def test_a_template_that_changes_the_history_is_noticed() -> None:
    trace = Trace()
    history = [*trace.words(50), END, *trace.words(50), END]
    trace.send([*history, *ASSISTANT, 103, *trace.words(64), END, *trace.words(30), END], trace.words(5))
    trace.send([*history, *ASSISTANT, *trace.words(64), END, *trace.words(30), END], trace.words(5))
    assert trace.lost["template_changed"] > 90


def test_tokens_are_lost_without_a_snapshot_or_after_its_eviction() -> None:
    trace = Trace()
    prompt = trace.words(1000)
    trace.send(prompt, [1])
    trace.send([*prompt[:700], *trace.words(300)], [1])
    assert trace.lost == {"no_snapshot": 688 - 512}
    trace.lost.clear()
    trace.send([*prompt[:700], *trace.words(200)], [1])
    assert trace.lost == {}, "where the prompts have parted there is a snapshot"
    trace.scheduler.reset_prefix_cache(preempt=False)
    few = Trace(places=1)
    few.send(prompt, [1])
    few.send(few.words(2000), [1])
    few.send(prompt, [1])
    assert few.lost == {"evicted": 992}


def test_others_pass_a_request_that_waits_for_states() -> None:
    """It waits for one snapshot, and there is room for it then."""
    scheduler = make(
        200, seqs=3, tokens=64, length=200, groups=BlockGroups((None,), has_states=True), snapshots=SnapshotStore(9, 8)
    )
    runner = FakeRunner(scheduler)
    prompt = [number % 7 for number in range(100)]
    scheduler.add(request("first", prompt, 3))
    runner.step()
    scheduler.add(request("second", [*prompt, 1, 2], 3))
    for name in "abc":
        scheduler.add(request(name, [50, 51], 30))
    runner.step()
    assert [running.id for running in scheduler._running] == ["first", "a"], "a place is left for the second"
    while scheduler.has_work:
        runner.step()
    assert list(runner.ended) == ["first", "second", "a", "b", "c"]


def test_500_chats_over_memory_for_50(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request gets another's states, and memory stays within its bound: checked after each step."""
    monkeypatch.setattr("quire.engine.scheduling.snapshot_borders._LEAST", 8)
    rng, places = random.Random(5), 50
    scheduler = make(
        600, seqs=8, length=200, groups=BlockGroups((None,), has_states=True), snapshots=SnapshotStore(places, 8)
    )
    runner = FakeRunner(scheduler)
    system = [rng.randrange(3) for _ in range(12)]
    chats = [[*system, *(rng.randrange(50) for _ in range(rng.randrange(4, 30)))] for _ in range(500)]
    order = [*range(500), *(rng.randrange(400, 500) for _ in range(100)), *rng.sample(range(500), 100)]
    hits = 0
    for begin in range(0, len(order), 10):
        numbers = sorted({*order[begin : begin + 10]})
        for number in numbers:
            scheduler.add(request(f"{begin}-{number}", chats[number], 3))
        while scheduler.has_work:
            plan = runner.step()
            hits += sum(new.snapshot is not None for new in plan.new)
            assert scheduler.stats().snapshot_bytes <= places * 8
            assert runner.saved.keys() <= {*range(places)}
        for number in numbers:
            tokens = runner.tokens[f"{begin}-{number}"]
            expected = list(chats[number])
            while len(expected) < len(chats[number]) + 3:
                expected.append(runner.next_of(expected))
            assert tokens == expected
            chats[number] = [*tokens, *(rng.randrange(50) for _ in range(5))]
    assert hits > 300
