"""The scheduler: how many tokens of which sequences the next step computes.

There is no prefill phase and no decode phase: a request has tokens and computed tokens, and each step spends a token
budget so that the computed ones catch up. Chunked prefill, prefix cache hits and preemption by recomputation are no
special cases. The design is vLLM V1's.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from quire.engine.client.protocol import (
    AddRequest,
    ErrorOutput,
    MediaItem,
    PictureItem,
    PooledArray,
    PooledOutput,
    RequestOutput,
    StepStats,
)
from quire.engine.scheduling.block_loads import Beginning, BlockLoads, EndedLoad
from quire.engine.scheduling.block_source import RemoteLoading
from quire.engine.scheduling.block_tables import ONE_GROUP, BlockGroups, BlockTables, Prefix
from quire.engine.scheduling.blocks import BlockPool, FilledBlock
from quire.engine.scheduling.cross_attention import CrossAttentionBlocks
from quire.engine.scheduling.drafter import Drafter
from quire.engine.scheduling.held_blocks import HeldBlocks
from quire.engine.scheduling.isolation import Isolation
from quire.engine.scheduling.items import EncoderCache, PlaceholderRanges
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.open_requests import OpenRequests
from quire.engine.scheduling.pipeline import StepShares
from quire.engine.scheduling.plan import ScheduledSequence, StepPlan, StepResult
from quire.engine.scheduling.request import Hasher, Request, token_array
from quire.engine.scheduling.run_ahead import RunAhead
from quire.engine.scheduling.speculation import Speculation
from quire.engine.scheduling.state_snapshots import PlannedSnapshot, SnapshotStore, StateSnapshots
from quire.engine.scheduling.tier_blocks import BlockTier, LoadRule
from quire.engine.scheduling.waiting import WaitingQueue

_SORT_KEY = attrgetter("sort_key")
_MOST_PASSED = 64  # requests that wait for states of others, and that others pass in a step


@dataclass(frozen=True, slots=True)
class _Postponed:
    """Tokens that attend in both directions, for which the budget of a step was too small.

    The next step keeps room for them before it computes others, so that they do not wait for the end of long answers.

    Attributes:
        request: whose tokens they are; None: there are none.
        count: their number, without those that are cached.
    """

    request: Request | None = None
    count: int = 0


_NOTHING_POSTPONED = _Postponed()


@dataclass(slots=True)
class _Room:
    """What requests that enter the batch may still add to a step.

    Attributes:
        tokens: that are computed.
        encoded: positions that an encoder computes.
    """

    tokens: int
    encoded: int


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step that was planned and has not finished: its sequences, the blocks that it fills, the states it saves."""

    scheduled: list[Request]
    filled: list[FilledBlock]
    snapshots: list[PlannedSnapshot]


_NO_STEP = _StepInFlight([], [], [])


class Scheduler:
    """Hold every request from its arrival until it finishes.

    `schedule` and `update` are called in pairs and in order. Further steps may be scheduled before the results of the
    first are known; they run in the order in which they were scheduled.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        groups: BlockGroups = ONE_GROUP,
        *,
        hasher: Hasher | None,
        by_priority: bool = False,
        fair: bool = False,
        tier: BlockTier | None = None,
        load_rule: LoadRule | None = None,
        remote: RemoteLoading | None = None,
        held: HeldBlocks | None = None,
        snapshots: SnapshotStore | None = None,
    ) -> None:
        """Make a scheduler without requests.

        Args:
            limits: sequences and tokens of a step, and lengths of sequences.
            pool: the blocks of the KV cache.
            groups: the groups of layers that take them.
            hasher: hash function of the prefix cache; None disables it.
            by_priority: requests with a smaller priority run first.
            fair: the flows of requests share the engine, instead of running in order of arrival.
            tier: has blocks that are not in memory; None: there is none.
            load_rule: when they are loaded; given with a tier.
            remote: how blocks of other engines are loaded; None: they are not.
            held: keeps blocks for other engines; None: none are kept.
            snapshots: where states are saved; None: models that have some do not read the prefix cache.
        """
        self.limits = limits
        self.pool = pool
        self._hasher = hasher
        self._requests: dict[str, Request] = {}
        self._open = OpenRequests()
        self._snapshots: StateSnapshots | None = None
        if snapshots is not None and hasher is not None and groups.has_states:
            self._snapshots = StateSnapshots(snapshots, pool.block_size, hasher)
        self._tables = BlockTables(pool, groups, hasher, self._snapshots)
        self.loads: BlockLoads | None = None
        if tier is not None or remote is not None:
            self.loads = BlockLoads(pool, self._tables, tier, load_rule, remote)
        self.held = held
        self._cross_attention = CrossAttentionBlocks(pool, hasher, limits.convolutions)
        self._speculation = Speculation(limits, self._tables)
        self.run_ahead = RunAhead(limits, self._tables, self._snapshots)
        self._encoder_cache = EncoderCache(limits.encoder_cache_size, limits.encoder_compute_budget, limits.pixel_cost)
        self._shares = StepShares(limits.stages)
        self._running: list[Request] = []  # sorted by sort key
        self._waiting = WaitingQueue(self._requests, by_priority=by_priority, fair=fair)
        self._in_flight: deque[_StepInFlight] = deque()
        self._removed: list[str] = []  # left the batch since the last plan
        self._postponed = _NOTHING_POSTPONED  # in the last plan
        self._isolation = Isolation()
        self._has_states = groups.has_states

    @property
    def has_work(self) -> bool:
        """Whether any unfinished request can continue: it waits neither for the rest of its prompt nor for a tier."""
        return len(self._requests) > len(self._open) + self._num_loading or not self._open.all_idle

    @property
    def _num_loading(self) -> int:
        """Requests that wait for blocks of a tier."""
        return 0 if self.loads is None else len(self.loads)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, message: AddRequest) -> None:
        """Queue a new request."""
        sort_key, start = self._waiting.assign_sort_key(message)
        request = Request(
            id=message.request_id,
            tokens=token_array(message.prompt),
            params=message.params,
            sort_key=sort_key,
            start=start,
            # Hashed, so that no salt can equal the hash of a block.
            root_hash=self._hasher((message.cache_salt or "").encode()) if self._hasher else b"",
            drafter=Drafter(self.limits.max_draft) if self.limits.max_draft else None,
            held_back=int(message.open),
            bidirectional=self.limits.bidirectional,
            first_keys=[message.cache_salt] if message.cache_salt else [],
            flow=message.flow,
            is_held=message.is_held,
            remote=message.remote,
            message_ends=None if message.message_ends is None else message.message_ends.tolist(),
            next_turn=message.next_turn,
        )
        if self.limits.encoder_cache_size:
            # As for prefixes: without a hasher nothing is shared.
            prefix = request.root_hash if self._hasher is not None else f"{request.id}\0".encode()
            if message.items or message.open:
                marks_audio = self.limits.marks_audio
                request.placeholders = PlaceholderRanges(message.items, prefix, marks_audio=marks_audio)
            if message.items:
                self._use_lora(request, message.items)
        elif message.items:
            (item,) = message.audio_items
            self._cross_attention.attach(request, item)
        if request.bidirectional is not None:
            request.hold_back(is_open=message.open)
        if request.bidirectional == "prompt":
            request.bind_to_prompt(self._hasher)
        self._requests[request.id] = request
        self._open.add(request)
        self._waiting.push(request)

    def extend(
        self, request_id: str, tokens: list[int], *, last: bool, items: tuple[MediaItem, ...] = ()
    ) -> str | None:
        """Append tokens and their items to the prompt of an open request; unknown ids are ignored.

        Returns:
            Why that is not possible, and the request has been dropped; None if it was.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        error = self._open.refusal(request, len(tokens), self.limits.max_model_len - 1)
        if error is not None:
            self._leave(request)
        else:
            if items:
                self._use_lora(request, items)
            if self._open.extend(request, tokens, last=last, items=items):
                self._waiting.push(request)
        return error

    def _use_lora(self, request: Request, items: tuple[MediaItem, ...]) -> None:
        """Compute a request that gets items with the model's adapter for them, if it has one.

        What was computed without it is computed again.
        """
        limits, before = self.limits, request.lora_id
        reads_picture = any(isinstance(item, PictureItem) for item in items)
        lora_id = limits.picture_lora_id if reads_picture else limits.item_lora_id
        if lora_id is None or before == lora_id or (before is not None and before == limits.picture_lora_id):
            return
        if request.in_batch:
            self._preempt(request)
        request.use_lora(lora_id, limits.lora_digests[lora_id], self._hasher)

    def abort(self, request_id: str) -> None:
        """Drop a request in any state; unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._leave(request)

    def schedule(self) -> StepPlan:
        """Choose the sequences of the next step: first those in the batch, then waiting ones."""
        plan, scheduled = StepPlan(), list[Request]()
        self._encoder_cache.begin_step(plan)
        if self.limits.rope_switch is not None:
            self._restart_outgrown(self.limits.rope_switch)
        alone = self._isolation.next(self._waiting.first())
        if alone is None or not self._schedule_alone(plan, scheduled, alone):
            postponed, self._postponed = self._postponed, _NOTHING_POSTPONED
            budget = self._schedule_running(plan, scheduled, self.limits.max_num_batched_tokens, postponed)
            if not plan.stats.preemptions:
                self._schedule_waiting(plan, scheduled, budget)
        plan.removed, self._removed = self._removed, []
        plan.prompt_extensions = self._open.take_extensions(plan.new)
        if scheduled:
            snapshots = [] if self._snapshots is None else self._snapshots.take_planned()
            self._in_flight.append(_StepInFlight(scheduled, self._tables.take_filled(), snapshots))
            self._shares.submit()
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Apply the results of the oldest step in flight; returns the outputs for the front end."""
        live: dict[str, Request] = {}
        discarded = set[str]()
        step = _NO_STEP
        if plan.scheduled:
            self._shares.finish()
            step = self._in_flight.popleft()
        for request in step.scheduled:
            request.steps_in_flight -= 1
            if request.steps_to_discard:
                request.steps_to_discard -= 1
                discarded.add(request.id)
            elif self._requests.get(request.id) is request:  # else aborted, or finished by an earlier step
                live[request.id] = request
        for request_id, logprobs in result.prompt_logprobs.items():
            if request_id in live:
                live[request_id].prompt_logprobs += logprobs
        for request_id, probs in result.token_probs.items():
            if request_id in live:
                live[request_id].token_probs = probs
        for key in result.not_encoded:
            self._encoder_cache.forget(key)
        outputs: list[RequestOutput] = []
        if result.errors:
            outputs += self._end_failed(plan, result, live)
        if result.lost:
            self._restart_lost(plan, result, live)
        self._tables.finish(step.filled, {*result.errors, *result.lost})
        if self._snapshots is not None:
            self._snapshots.finish(step.snapshots, {*result.errors, *result.lost, *discarded})
        drafts = {item.request_id: item for item in plan.scheduled if item.draft}
        for sampled in result.sampled:
            if (live_request := live.get(sampled.request_id)) is not None:
                item = drafts.get(sampled.request_id) if drafts else None
                if item is not None:
                    self._speculation.record(live_request, sampled, len(item.draft), plan.stats)
                outputs.append(output := live_request.take_sampled(sampled, self.limits.max_model_len))
                if item is not None and self._has_states and len(sampled.tokens) <= len(item.draft):
                    live_request.num_computed_tokens = item.start  # its states are those before the step
                plan.stats.step_tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    if live_request.is_held and self.held is not None:
                        output.held_blocks = self.held.hold(live_request)
                    self._leave(live_request)
        outputs += [self._finish_pooling(live[name], data) for name, data in result.pooled.items() if name in live]
        self.pool.end_step()
        return outputs

    def _end_failed(self, plan: StepPlan, result: StepResult, live: dict[str, Request]) -> list[RequestOutput]:
        """Drop the sequences of `live` that a step failed for.

        One that read cached blocks, and for which the model computed NaN, is computed again without them: they may
        hold NaN of another sequence, since attention kernels multiply later values by 0.
        """
        starts = {item.request_id: item.start for item in plan.scheduled}
        encoded = plan.encoded_blocks
        outputs: list[RequestOutput] = []
        for request_id, error in result.errors.items():
            if request_id in live:
                failed = live.pop(request_id)
                # The step may not have computed the blocks that were cached when it was scheduled.
                start = 0 if error.corrupted else starts.get(request_id, 0)
                self._tables.evict(failed, start)
                self.pool.evict_blocks(encoded.get(request_id, ()))
                if error.corrupted:
                    self._drop_items(failed)
                    if failed.computed_on_entry and failed.in_batch:
                        failed.avoids_cache = True
                        failed.restart()
                        self._preempt(failed)
                        continue
                    plan.stats.corrupted += 1
                self._leave(failed)
                outputs.append(ErrorOutput(request_id, error.message, error.invalid))
        return outputs

    def _restart_lost(self, plan: StepPlan, result: StepResult, live: dict[str, Request]) -> None:
        """Compute the sequences again whose states a step may have changed that failed, each alone."""
        items = {item.request_id: item for item in plan.scheduled}
        for request_id in result.lost:
            if (request := live.pop(request_id, None)) is not None:
                item = items[request_id]
                self._tables.evict(request, item.start)
                request.restart()
                self._isolation.add(request, item.start + item.count - len(item.draft) + plan.further_steps)
                if request.in_batch:  # else preempted while the step was in flight
                    self._preempt(request)

    def _drop_items(self, request: Request) -> None:
        """Let other requests not find the items of a request: what was computed for them may be NaN."""
        if request.cross_attention is not None:
            self.pool.evict_blocks(request.cross_attention.blocks)
        if request.placeholders is not None:
            self._encoder_cache.drop(request.placeholders)

    def reset_prefix_cache(self, *, preempt: bool) -> None:
        """Let requests that enter the batch later find no blocks. No step is in flight.

        Args:
            preempt: requests in the batch leave it, and compute their tokens anew. Else they keep their blocks.
        """
        if self.loads is not None:
            for request in self.loads.abandon_all():
                self._waiting.push(request)
        if self.held is not None:
            self.held.clear()
        for request in self._running.copy():
            if preempt:
                self._preempt(request)
            elif self._hasher is not None:
                request.leave_prefix_cache(self._hasher)
        self.pool.evict_all()
        if self._snapshots is not None:
            self._snapshots.clear()

    def end_loads(self) -> list[EndedLoad]:
        """Queue the requests again that have waited for blocks, which are there or will not come; returns the loads.

        Requests whose blocks another engine did not send are dropped, unless they are to be computed.
        """
        ended = [] if self.loads is None else self.loads.take_ended()
        for load in ended:
            if load.failure is None or self.recomputes:
                self._waiting.push(load.request)
            else:
                self._leave(load.request)
        return ended

    @property
    def recomputes(self) -> bool:
        """Whether requests are computed whose blocks another engine did not send."""
        return self.loads is not None and self.loads.recomputes

    def reset_encoder_cache(self) -> None:
        """Let items be encoded anew. No step is in flight."""
        self._encoder_cache.clear()
        if self.limits.convolutions:  # of audio that all tokens attend to; its encodings are blocks
            self.reset_prefix_cache(preempt=False)

    def stats(self, plan: StepPlan | None = None) -> StepStats:
        """Gauges as of now, with the counters of a step that has finished if one is given."""
        stats = StepStats() if plan is None else plan.stats
        stats.running, stats.waiting = len(self._running), len(self._requests) - len(self._running)
        stats.deferred = len(self._open.waiting_for_input) + self._num_loading
        stats.blocks_used, stats.blocks_total = self._tables.usage(stats.running)
        if self.held is not None:
            stats.held_blocks = self.held.num_blocks
        if self.pool.residency is not None:
            self.pool.residency.report(stats)
        if self._snapshots is not None:
            stats.snapshot_bytes = self._snapshots.nbytes
            if plan is not None:
                self._snapshots.report(stats)
        return stats

    def check(self) -> None:
        """Assert that queues, requests and the block pool are consistent."""
        requests = self._requests.values()
        encoded = [request.cross_attention.blocks for request in requests if request.cross_attention is not None]
        waiting, loading = self._waiting.ids(), set[str]()
        if self.loads is not None:
            self.loads.check()
            encoded += self.loads.held()
            loading = {request.id for request in self.loads}
        if self.held is not None:
            self.held.check()
            encoded += self.held.held()
        running = {request.id for request in self._running}
        self._tables.check(requests, running, encoded)
        if self._snapshots is not None:
            self._snapshots.check(running)
        waiting_for_input = self._open.waiting_for_input
        self._encoder_cache.check()
        states = (waiting, running, waiting_for_input, loading)
        assert set().union(*states) == set(self._requests), "a request is neither waiting nor running"
        assert sum(map(len, states)) == len(self._requests), "a request is in two states"
        self._open.check()
        assert self._running == sorted(self._running, key=_SORT_KEY), "running requests are out of order"
        for request in requests:
            self._cross_attention.check(request)

    def _schedule_alone(self, plan: StepPlan, scheduled: list[Request], request: Request) -> bool:
        """Schedule a request in a step of its own; False: it cannot continue before others have left."""
        budget = self.limits.max_num_batched_tokens
        if request.in_batch:
            self._schedule_running(plan, scheduled, budget, _NOTHING_POSTPONED, only=request)
        else:
            self._schedule_waiting(plan, scheduled, budget, most=1)
        return bool(scheduled)

    def _schedule_running(
        self,
        plan: StepPlan,
        scheduled: list[Request],
        budget: int,
        postponed: _Postponed,
        only: Request | None = None,
    ) -> int:
        max_model_len, switch = self.limits.max_model_len, self.limits.rope_switch
        pending = [
            request.num_new_tokens(max_model_len, switch)
            if request.num_output_placeholders
            else len(request.tokens) - request.held_back - request.num_computed_tokens
            for request in self._running
        ]
        if only is not None:
            pending = [count if request is only else 0 for request, count in zip(self._running, pending, strict=True)]
        self._shares.begin_step(self._running, pending)
        decoding = pending.count(1)
        self._speculation.begin_step(decoding)
        if only is None and decoding == len(self._running) == len(self._requests):
            plan.further_steps = self.run_ahead.choose(self._running, self.pool.num_free)
        index, reserved = 0, postponed.count
        while index < len(self._running):  # preemption removes from the end, so indices into `pending` stay valid
            request = self._running[index]
            decoding -= pending[index] == 1
            if request is postponed.request:
                reserved, room = 0, budget
            else:  # a long prompt leaves one token for each sequence after it that needs only one
                room = budget - max(decoding, reserved)
            count = request.within_prompt(request.num_computed_tokens, min(pending[index], room))
            if self._snapshots is not None and count > 1:
                count = self._snapshots.cut(request, request.num_computed_tokens, count)
            if request.bidirectional is not None:
                count = request.whole_spans(request.num_computed_tokens, count) if count > 0 else 0
                if count == 0 and pending[index] > 0:
                    self._postpone(request, self._span_left(request, request.num_computed_tokens))
            if count > 0 and not self._make_room(plan, request, count):
                break
            if request.placeholders is not None:
                count = self._readable(plan, request, request.num_computed_tokens, count)
            if count > 0:
                drafted = room - count
                if self._snapshots is not None:
                    drafted = self._snapshots.room_for_draft(request.num_computed_tokens + count, drafted)
                draft = self._speculation.draft(request, drafted)
                self._schedule_sequence(plan, scheduled, request, count, draft=draft)
                budget -= count + len(draft)
            index += 1
        return budget

    def _make_room(self, plan: StepPlan, request: Request, count: int) -> bool:
        """Preempt the last sequences until `count` more tokens fit; False if that preempted `request` itself."""
        self._tables.drop_unseen(request)
        needed = self._tables.missing(request, request.num_computed_tokens + count)
        while needed > self.pool.num_free:
            victim = self._running[-1]
            if len(self._running) == 1 and self._end_hold():
                continue
            self._preempt(victim)
            victim.preemptions += 1
            plan.stats.preemptions += 1
            if victim is request:
                return False
        return True

    def _schedule_waiting(self, plan: StepPlan, scheduled: list[Request], budget: int, most: int | None = None) -> None:
        """Let waiting requests enter the batch. `most`: so many; None: all that fit, but none that is to be alone."""
        self._enter_batch(plan, scheduled, budget, most)
        self._waiting.restore()

    def _enter_batch(self, plan: StepPlan, scheduled: list[Request], budget: int, most: int | None) -> None:
        is_alone = most is not None
        room = _Room(budget, self.limits.encoder_compute_budget)
        most = most or self._shares.share(min(len(self._requests), self.limits.max_num_seqs))
        while room.tokens > 0 and len(scheduled) < most and (request := self._waiting.first()):
            if not self._may_enter(request, is_alone):
                return
            prefix = self._prefix_of(request, None if is_alone else self._snapshots)
            if prefix is None:
                self._waiting.set_aside()
                if self._waiting.num_aside == _MOST_PASSED:
                    return
                continue
            beginning = self._begin_loading(request, prefix)
            if beginning == "has no room":
                return
            if beginning == "waits":
                self._waiting.pop()
            elif len(request.tokens) - request.held_back <= prefix.count * self.pool.block_size:
                self._waiting.pop()
                self._open.waiting_for_input.add(request.id)
            elif not self._enter(plan, scheduled, request, prefix, room):
                return

    def _may_enter(self, request: Request, is_alone: bool) -> bool:
        """Whether there is a place in the batch, and the first of the waiting requests can take it now."""
        if request.alone_until and not is_alone:
            return False
        taken = len(self._running) + self._num_loading + self._waiting.num_aside
        if taken >= self.limits.max_num_seqs and not self._preempt_idle():
            return False
        return not request.steps_in_flight  # of one that was preempted, such a step still appends to its tokens

    def _prefix_of(self, request: Request, snapshots: StateSnapshots | None) -> Prefix | None:
        """The cached prefix of a request; None while it would compute again what a sequence in the batch computes."""
        if self.limits.rope_switch is not None:
            request.choose_rope(self.limits.rope_switch, self._hasher)
        if snapshots is None:
            return self._tables.match(request)
        if snapshots.is_awaited(request):
            return None
        prefix = self._tables.match(request)
        return None if snapshots.is_coming(request, prefix.count * self.pool.block_size) else prefix

    def _begin_loading(self, request: Request, prefix: Prefix) -> Beginning:
        """Begin to load what other tiers have of a request's blocks, for which idle sequences give up theirs."""
        if self.loads is None or request.held_back:
            return "computes"
        beginning = self.loads.begin(request, prefix)
        while beginning == "has no room" and self._reclaim():
            beginning = self.loads.begin(request, prefix)
        return beginning

    def _enter(self, plan: StepPlan, scheduled: list[Request], request: Request, prefix: Prefix, room: _Room) -> bool:
        """Let the first of the waiting requests enter the batch; return whether there is room for it."""
        computed = prefix.count * self.pool.block_size
        count = self._first_chunk(request, computed, room.tokens)
        fresh = self._tables.missing_on_entry(prefix, computed + (count or self._span_left(request, computed)))
        cross = self._cross_attention.cached(request.cross_attention)
        if request.cross_attention is not None and not cross:
            if request.cross_attention.length > room.encoded and room.encoded < self.limits.encoder_compute_budget:
                return False
            room.encoded -= request.cross_attention.length
            fresh += self.pool.blocks_for(request.cross_attention.length)
        while not self.pool.can_take([*prefix.held, *cross], fresh):
            if not self._reclaim():
                return False
        if count == 0:
            self._postpone(request, self._span_left(request, computed))
            return False
        request.computed_on_entry = computed
        count = self._readable(plan, request, computed, count)
        if count == 0:
            return False  # the step encodes no more items
        self._start(plan, request, prefix, cross)
        self._schedule_sequence(plan, scheduled, request, count, enters=True)
        room.tokens -= count
        return True

    def _first_chunk(self, request: Request, computed: int, budget: int) -> int:
        """The number of tokens behind `computed` cached ones that the first step of a request may compute."""
        count = request.within_prompt(computed, min(len(request.tokens) - request.held_back - computed, budget))
        if self._snapshots is not None:
            self._snapshots.prepare(request, computed)
            count = self._snapshots.cut(request, computed, count)
        return count if request.bidirectional is None else request.whole_spans(computed, count)

    def _start(self, plan: StepPlan, request: Request, prefix: Prefix, cross: list[int]) -> None:
        """Move the first of the waiting requests to those that run, with the blocks that it begins with."""
        computed = prefix.count * self.pool.block_size
        self._waiting.pop()
        insort(self._running, request, key=_SORT_KEY)
        self._tables.enter(request, prefix)
        request.prompt_logprobs = [None] if request.wants_prompt_logprobs else []
        request.mark_scheduled()
        snapshot = None
        if self._snapshots is not None:
            is_first = request.cached_tokens is None
            snapshot = self._snapshots.enter(request, prefix.count, is_first=is_first, was_cached=prefix.in_memory)
        self._tables.record(request, computed, plan.stats, has_tier=self.loads is not None and self.loads.has_tier)
        if self.loads is not None and prefix.count:
            self.loads.touch(request, prefix)
        entered = (
            None
            if request.cross_attention is None
            else self._cross_attention.enter(request.cross_attention, cross, plan.stats)
        )
        plan.new.append(request.to_new_sequence(entered, snapshot))

    def _postpone(self, request: Request, count: int) -> None:
        """Let the next step keep room for so many tokens, for which there is too little in this one."""
        if count and self._postponed.request is None:
            self._postponed = _Postponed(request, count)

    @staticmethod
    def _span_left(request: Request, start: int) -> int:
        """The number of tokens from `start` on that attend in both directions; 0 if that one does not."""
        spans = request.bidirectional_spans(start, start + 1)
        return spans[0].end - start if spans else 0

    def _readable(self, plan: StepPlan, request: Request, start: int, count: int) -> int:
        """As many of `count` tokens as the items allow that are encoded, or can be in this step."""
        if request.placeholders is None or start >= request.prompt_len or count <= 0:
            return count
        cache, spans, whole = self._encoder_cache, request.placeholders, request.bidirectional == "prompt"
        if whole and not cache.reads_all(spans, start, start + count):
            return 0
        return cache.readable(plan, spans, start, count, request.computed_on_entry, exceeds_budget=whole)

    def _preempt_idle(self) -> bool:
        """Take the last sequence that waits for the rest of its prompt out of the batch; False if there is none.

        It holds no blocks until its prompt grows; its blocks stay cached until they are allocated again.
        """
        idle = next((r for r in reversed(self._running) if r.is_idle and not r.steps_in_flight), None)
        if idle is not None:
            self._preempt(idle)
        return idle is not None

    def _reclaim(self) -> bool:
        """Free some blocks for a request that waits; False: there are none that could be freed."""
        return self._preempt_idle() or (not self._running and not self._num_loading and self._end_hold())

    def _end_hold(self) -> bool:
        """Give back blocks that are kept for another engine, as nothing else can run without them."""
        return self.held is not None and self.held.end_one()

    def _schedule_sequence(
        self,
        plan: StepPlan,
        scheduled: list[Request],
        request: Request,
        count: int,
        *,
        enters: bool = False,
        draft: tuple[int, ...] = (),
    ) -> None:
        start, end = request.num_computed_tokens, request.num_computed_tokens + count
        new_blocks = self._tables.grow(request, end + len(draft) + plan.further_steps)
        if enters:
            new_blocks = tuple(itertools.chain.from_iterable(request.tables))
        samples = request.generates and end == len(request.tokens) + request.num_output_placeholders
        items = () if request.placeholders is None else request.placeholders.tokens(start, end)
        bidirectional = () if request.bidirectional is None else request.bidirectional_spans(start, end)
        moves_on = draft or plan.further_steps  # the step does not end with the states behind these tokens
        snapshot = None if self._snapshots is None or moves_on else self._snapshots.plan(request, end)
        plan.scheduled.append(
            ScheduledSequence(
                *(request.id, start, count + len(draft), new_blocks, samples, draft, items, bidirectional, snapshot)
            )
        )
        scheduled.append(request)
        request.num_computed_tokens = end
        request.steps_in_flight += 1
        request.prefill_chunks += start < request.prompt_len
        if samples:
            request.num_output_placeholders += 1
            request.awaits_tokens = bool(draft) or self.limits.stages > 1
        self._tables.cache_full_blocks(request, min(end, len(request.tokens)))
        plan.stats.step_tokens += max(0, min(end, request.prompt_len) - start)

    def _restart_outgrown(self, rope_switch: int) -> None:
        """Take sequences out of the batch that have become longer: their next token needs other keys of all tokens."""
        for request in self._running.copy():
            if len(request.tokens) > rope_switch and not request.uses_long_rope and not request.steps_in_flight:
                self._preempt(request)

    def _preempt(self, request: Request) -> None:
        is_idle = request.is_idle
        self._leave_batch(request)
        request.num_computed_tokens = 0
        if is_idle:
            self._open.waiting_for_input.add(request.id)
        else:
            self._waiting.push(request)

    def _leave(self, request: Request) -> None:
        del self._requests[request.id]
        self._open.discard(request)
        self._isolation.discard(request)
        if request.in_batch:
            self._leave_batch(request)
        else:
            if self.loads is not None:
                self.loads.abandon(request)
            self._waiting.compact(len(self._requests) - len(self._running))
            if self._snapshots is not None:
                self._snapshots.leave(request)

    def _leave_batch(self, request: Request) -> None:
        self._running.remove(request)
        self._tables.leave(request)
        if self._snapshots is not None:
            self._snapshots.leave(request)
        self._cross_attention.leave(request.cross_attention)
        self._removed.append(request.id)

    def _finish_pooling(self, request: Request, data: PooledArray) -> PooledOutput:
        self._leave(request)
        cached, loaded = request.cached_tokens or 0, request.loaded_tokens
        return PooledOutput(request.id, data, cached, request.scheduled_at, loaded)
