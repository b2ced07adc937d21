"""A scheduler without a model: requests, and a runner that applies and checks all plans."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest

from quire.engine.client.kv_transfer import RemoteBlocks
from quire.engine.client.protocol import AddRequest, ErrorOutput, TokensOutput
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.scheduling.block_observer import BlockObserver
from quire.engine.scheduling.block_source import RemoteLoading
from quire.engine.scheduling.block_tables import ONE_GROUP, BlockGroups
from quire.engine.scheduling.blocks import BlockPool, hasher_named
from quire.engine.scheduling.held_blocks import HeldBlocks
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import SampledTokens, ScheduledSequence, SequenceError, StepPlan, StepResult
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.state_snapshots import SnapshotStore
from quire.engine.scheduling.tier_blocks import BlockTier, LoadRule

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
    further: int = 0,
    rope_switch: int | None = None,
    stages: int = 1,
    groups: BlockGroups = ONE_GROUP,
    tier: BlockTier | None = None,
    load_rule: LoadRule | None = None,
    observers: Sequence[BlockObserver] = (),
    remote: RemoteLoading | None = None,
    held_in: Callable[[BlockPool], HeldBlocks] | None = None,
    snapshots: SnapshotStore | None = None,
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=groups.longest(blocks, length, tokens, BLOCK),
        max_draft=draft,
        max_further_steps=further,
        rope_switch=rope_switch,
        stages=stages,
    )
    hasher = hasher_named("sha256") if caching else None
    pool = BlockPool(blocks, BLOCK, observers=observers)
    return Scheduler(
        limits,
        pool,
        groups,
        hasher=hasher,
        by_priority=by_priority,
        tier=tier,
        load_rule=load_rule,
        remote=remote,
        held=None if held_in is None else held_in(pool),
        snapshots=snapshots,
    )


def request(name: str, prompt: Iterable[int], max_tokens: int = 4, **fields: object) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return AddRequest(name, np.array(list(prompt), np.int32), params, **fields)  # type: ignore[arg-type]


class FakeRunner:
    """Stand in for the model runner: apply all plans and assert that they are valid.

    With several stages the result of a step is known when as many steps are in flight, or no other can be planned.
    """

    def __init__(self, scheduler: Scheduler, *, varied: bool = True) -> None:
        """`varied`: the model's tokens are hard to predict for a drafter."""
        self.scheduler = scheduler
        self.varied = varied
        self.windows = scheduler._tables._groups.windows
        self.tables: dict[str, list[list[int]]] = {}  # of each group
        self.states: dict[str, tuple[int, ...]] = {}  # the tokens that they hold, if layers have states
        self.saved: dict[int, tuple[int, ...]] = {}  # such states, by place
        self.poisoned: set[str] = set()  # requests that each step with them fails for
        self.lost = 0  # sequences whose states a failed step has changed
        self.further = 0  # further steps that were run
        self.numbers = itertools.count()
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.kept: dict[str, RemoteBlocks | None] = {}  # for other engines, of requests that have ended
        # Block -> whether its keys are those of a long sequence, and all tokens up to its end when it was written.
        self.written: dict[int, tuple[bool, tuple[int, ...]]] = {}
        self.extended: dict[str, bool] = {}
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.failing: dict[str, SequenceError] = {}  # requests that the next step with them fails for

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for name in plan.removed:
            del self.tables[name]
            del self.states[name]
        for new in plan.new:
            assert new.request_id not in self.tables
            self.tables[new.request_id] = [[] for _ in self.windows]
            self.states[new.request_id] = () if new.snapshot is None else self.saved[new.snapshot]
            self.tokens[new.request_id] = list(new.tokens)
            self.extended[new.request_id] = new.uses_long_rope
        limits = self.scheduler.limits
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len(plan.scheduled) <= limits.max_num_seqs
        assert len({item.request_id for item in plan.scheduled}) == len(plan.scheduled)
        further = next(self.numbers) % (plan.further_steps + 1)  # a sequence may have ended
        self.further += further
        for item in plan.scheduled:
            self._apply(item, plan.further_steps, further)
        assert sum(bool(item.draft) for item in plan.scheduled) <= (limits.max_drafting or limits.max_num_seqs)
        sampled = [
            SampledTokens(item.request_id, self._sample(item, further)) for item in plan.scheduled if item.samples
        ]
        for item in plan.scheduled if self.scheduler._has_states else ():
            self._check_states(item, further)
        awaited = {item.request_id for before, _ in self.in_flight for item in before.scheduled if item.samples}
        assert awaited.isdisjoint(item.request_id for item in plan.scheduled)
        if not plan.is_empty or not self.in_flight:
            failed = self.failing.keys() & {item.request_id for item in plan.scheduled}
            errors = {name: self.failing.pop(name) for name in failed}
            lost = self._lost(plan, errors)
            for item in plan.scheduled if not (errors or lost) else ():
                if item.snapshot is not None:
                    self.saved[item.snapshot] = self.states[item.request_id]
            sampled = [tokens for tokens in sampled if tokens.request_id not in {*errors, *lost}]
            self.in_flight.append((plan, StepResult(sampled, errors=errors, lost=lost)))
        if len(self.in_flight) == limits.stages or plan.is_empty:
            self.finish()
        self.scheduler.check()
        return plan

    def finish(self) -> None:
        """Give the scheduler the result of the oldest step."""
        plan, result = self.in_flight.popleft()
        outputs = self.scheduler.update(plan, result)
        self.scheduler.run_ahead.measure(plan, result, 1e-9)
        for output in outputs:
            if isinstance(output, ErrorOutput):
                self.ended[output.request_id] = "error"
                continue
            assert isinstance(output, TokensOutput)
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id], self.kept[output.request_id] = output.finish_reason, output.held_blocks

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                return
            self.step()
        pytest.fail("requests do not finish")

    def next_of(self, tokens: list[int]) -> int:
        """The model's next token."""
        return sum(tokens) % 7 if self.varied else tokens[-1] % 2

    def _sample(self, item: ScheduledSequence, further: int) -> list[int]:
        """The model's tokens, up to the first that differs from the draft, and those of further steps."""
        tokens = list(self.tokens[item.request_id])
        out = []
        for drafted in (*item.draft, None):
            out.append(self.next_of(tokens))
            tokens.append(out[-1])
            if out[-1] != drafted:
                break
        for _ in range(further):
            out.append(self.next_of(tokens))
            tokens.append(out[-1])
        return out

    def _apply(self, item: ScheduledSequence, most_further: int, further: int) -> None:
        tokens, tables = self.tokens[item.request_id], self.tables[item.request_id]
        new = len(item.new_blocks) // max(1, len(tables))
        for index, table in enumerate(tables):
            table += item.new_blocks[index * new : (index + 1) * new]
        end = item.start + item.count - len(item.draft)
        assert end > item.start
        assert end <= len(tokens)
        assert item.samples == (end == len(tokens))
        assert item.samples or not item.draft
        assert not most_further or (item.samples and not item.draft and item.count == 1)
        limits = self.scheduler.limits
        extended, switch = self.extended[item.request_id], limits.rope_switch
        assert extended == (switch is not None and len(tokens) > switch)
        assert extended or switch is None or item.start + item.count <= switch
        written = [*tokens, *item.draft]
        if further:
            written += self._sample(item, further)[:-1]
        assert extended or switch is None or len(written) <= switch
        for table, window in zip(tables, self.windows, strict=True):
            assert len(table) * BLOCK >= end + len(item.draft) + most_further
            unused = limits.max_draft + limits.max_further_steps  # blocks of drafts and steps of before
            assert len(table) <= -(-end // BLOCK) + unused
            first = 0 if window is None else max(0, item.start - window + 1)
            for position in range(first, item.start):  # written with the same tokens and the same rope
                found_extended, content = self.written[table[position // BLOCK]]
                assert (found_extended, content[: position + 1]) == (extended, tuple(tokens[: position + 1]))
            for position in range(item.start, item.start + item.count + further):
                self.written[table[position // BLOCK]] = extended, tuple(written[: position + 1])

    def _check_states(self, item: ScheduledSequence, further: int) -> None:
        """States hold the tokens before those of the step; they go back where a draft is not accepted as a whole."""
        before, tokens = self.states[item.request_id], (*self.tokens[item.request_id], *item.draft)
        assert not item.start or before == tokens[: item.start]
        sampled = self._sample(item, further)
        if len(sampled) > len(item.draft):
            self.states[item.request_id] = (*tokens, *sampled[:further])[: item.start + item.count + further]

    def _lost(self, plan: StepPlan, errors: dict[str, SequenceError]) -> list[str]:
        """Let a step fail that has poisoned requests: the one that is alone ends, else all lose their states."""
        names = [item.request_id for item in plan.scheduled]
        if self.poisoned.isdisjoint(names):
            return []
        if len(names) == 1:
            errors[names[0]] = SequenceError("poisoned")
            return []
        self.lost += len(names)
        self.states.update(dict.fromkeys(names, (-1,)))
        return names
