"""Who gets how many tokens this step.

There is no prefill phase and no decode phase: a request has tokens and computed tokens, and each step hands out a token
budget so that the second catch up with the first. Chunked prefill, prefix hits and preemption by recomputation are
then one case. The idea is vLLM V1's.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.drafter import Drafter
from quire.engine.scheduling.plan import Admission, Sampled, StepPlan, StepResult, Work
from quire.engine.scheduling.request import Hasher, Request
from quire.engine.wire.protocol import AddRequest, SequenceOutput, StepStats

_ORDER = attrgetter("order")
# Up to so many tokens a step are read with the weights that one token needs: beyond, a CPU's arithmetic is what counts.
_FREE_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a step. `max_tokens` is at least `max_seqs`, so that every running sequence can move.

    `max_draft`: most tokens that are guessed for a sequence; 0 for no speculation.
    """

    max_seqs: int
    max_tokens: int
    max_model_len: int
    max_draft: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < self.max_seqs:
            raise ValueError("the token budget of a step must be at least the number of sequences in it")


class Scheduler:
    """Holds every request from its arrival to its end."""

    def __init__(
        self, limits: SchedulerLimits, pool: BlockPool, *, hasher: Hasher | None, by_priority: bool = False
    ) -> None:
        """Without a `hasher` no block is ever shared."""
        self.limits = limits
        self.pool = pool
        self._hasher = hasher
        self._by_priority = by_priority
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []  # sorted by order
        self._waiting: list[tuple[tuple[int, int], Request]] = []  # heap; may hold requests that are gone
        self._removed: list[str] = []  # left the batch since the last plan
        self._arrivals = itertools.count()
        self._stats = StepStats()

    @property
    def has_work(self) -> bool:
        """Whether any request is here."""
        return bool(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, message: AddRequest) -> None:
        """Put a new request in line."""
        arrival = next(self._arrivals)
        request = Request(
            id=message.request_id,
            tokens=message.prompt.tolist(),
            params=message.params,
            order=(message.priority if self._by_priority else 0, arrival),
            # Hashed, so that no salt can pass for the hash of somebody else's block.
            root=self._hasher((message.cache_salt or "").encode()) if self._hasher else b"",
            drafter=Drafter(self.limits.max_draft) if self.limits.max_draft else None,
        )
        self._requests[request.id] = request
        heapq.heappush(self._waiting, (request.order, request))

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it is; one that is unknown or has ended is no error."""
        request = self._requests.get(request_id)
        if request is not None:
            self._leave(request)

    def plan(self) -> StepPlan:
        """Choose this step's work: first for those in the batch, then for those in line."""
        self._stats = StepStats()
        plan = StepPlan()
        budget = self._continue_running(plan, self.limits.max_tokens)
        if not self._stats.preemptions:
            self._admit_waiting(plan, budget)
        plan.removed, self._removed = self._removed, []
        return plan

    def finish(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Take in what the model made of the plan."""
        for item in plan.work:
            request = self._requests[item.request_id]
            request.computed = item.start + item.count - len(item.draft)
            request.prompt_logprobs += result.prompt_logprobs.get(item.request_id, ())
        drafts = {item.request_id: len(item.draft) for item in plan.work if item.draft}
        return [self._extend(sampled, drafts.get(sampled.request_id, 0)) for sampled in result.sampled]

    def stats(self) -> StepStats:
        """The books after the last step."""
        stats = self._stats
        stats.running, stats.waiting = len(self._running), len(self._requests) - len(self._running)
        stats.blocks_used, stats.blocks_total = self.pool.num_used, self.pool.num_blocks
        return stats

    def idle_stats(self) -> StepStats:
        """The books between steps."""
        self._stats = StepStats()
        return self.stats()

    def check(self) -> None:
        """Assert that the books balance."""
        self.pool.check(request.blocks for request in self._requests.values())
        waiting = {request.id for _, request in self._waiting if self._requests.get(request.id) is request}
        running = {request.id for request in self._running}
        assert waiting | running == set(self._requests), "a request is neither waiting nor running"
        assert not waiting & running, "a request is both waiting and running"
        assert self._running == sorted(self._running, key=_ORDER), "running requests are out of order"
        for request in self._requests.values():
            held = len(request.blocks) * self.pool.block_size
            assert request.computed <= held, "computed tokens without a block"
            assert request.id in running or not request.blocks, "a waiting request holds blocks"

    def _continue_running(self, plan: StepPlan, budget: int) -> int:
        decoding = sum(1 for request in self._running if request.pending == 1)
        drafts = max(0, _FREE_TOKENS - decoding)
        index = 0
        while index < len(self._running):
            request = self._running[index]
            decoding -= request.pending == 1
            # A long prompt leaves a token for each sequence behind it that only needs one.
            count = min(request.pending, budget - decoding)
            if count > 0 and not self._make_room(request, count):
                break
            if count > 0:
                draft = self._draft(request, min(budget - decoding - count, drafts))
                self._schedule(plan, request, count, draft=draft)
                budget -= count + len(draft)
                drafts -= len(draft)
            index += 1
        return budget

    def _draft(self, request: Request, room: int) -> tuple[int, ...]:
        """A guess at what follows a sequence that only lacks its next token; nobody gives way to a guess."""
        if request.drafter is None or request.pending != 1:
            return ()
        held = (len(request.blocks) + self.pool.num_free) * self.pool.block_size
        room = min(room, held - len(request.tokens), request.room_for_draft(self.limits.max_model_len))
        return request.drafter.draft(request.tokens, room)

    def _make_room(self, request: Request, count: int) -> bool:
        """Preempt from the end of the line until `count` more tokens fit; false if it had to be this request."""
        needed = self.pool.blocks_for(request.computed + count) - len(request.blocks)
        while needed > self.pool.num_free:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _admit_waiting(self, plan: StepPlan, budget: int) -> None:
        while budget > 0 and len(self._running) < self.limits.max_seqs and (request := self._next_in_line()):
            matched = self._cached_prefix(request)
            computed = len(matched) * self.pool.block_size
            count = min(len(request.tokens) - computed, budget)
            fresh = self.pool.blocks_for(computed + count) - len(matched)
            if not self.pool.can_take(matched, fresh):
                return
            heapq.heappop(self._waiting)
            insort(self._running, request, key=_ORDER)
            self.pool.hold(matched)
            request.blocks, request.computed, request.published = matched, computed, len(matched)
            request.prompt_logprobs = [None] if request.wants_prompt_logprobs else []
            request.mark_scheduled()
            self._count_prefix(request, computed)
            plan.admitted.append(
                Admission(
                    request.id,
                    tuple(request.tokens),
                    request.prompt_len,
                    request.params,
                    request.params.prompt_logprobs if request.wants_prompt_logprobs else None,
                )
            )
            self._schedule(plan, request, count, matched)
            budget -= count

    def _schedule(
        self,
        plan: StepPlan,
        request: Request,
        count: int,
        matched: list[int] | None = None,
        draft: tuple[int, ...] = (),
    ) -> None:
        end = request.computed + count
        # After a draft that was wrong there may be blocks left.
        fresh = self.pool.allocate(max(0, self.pool.blocks_for(end + len(draft)) - len(request.blocks)))
        new_blocks = tuple(fresh) if matched is None else (*matched, *fresh)
        request.blocks = request.blocks + fresh
        samples = end == len(request.tokens)
        plan.work.append(Work(request.id, request.computed, count + len(draft), new_blocks, samples, draft))
        self._publish(request, end)
        self._stats.step_tokens += count + len(draft)

    def _publish(self, request: Request, end: int) -> None:
        """Let others find the blocks that this step fills.

        Already now: keys and values of a whole step are written before any of its queries reads them, so a request
        that enters the same step may share them.
        """
        if self._hasher is None:
            return
        size = self.pool.block_size
        hashes = request.block_hashes(size, self._hasher)
        for index in range(request.published, end // size):
            self.pool.publish(request.blocks[index], hashes[index])
        request.published = end // size

    def _cached_prefix(self, request: Request) -> list[int]:
        """Blocks of the known beginning; at least one token is left to compute, for its logits."""
        if self._hasher is None or request.wants_prompt_logprobs:
            return []
        hashes = request.block_hashes(self.pool.block_size, self._hasher)
        return self.pool.match(hashes[: (len(request.tokens) - 1) // self.pool.block_size])

    def _count_prefix(self, request: Request, hit: int) -> None:
        if request.cached_tokens is None:
            request.cached_tokens = hit
            if self._hasher is not None:
                self._stats.prefix_queries += len(request.tokens)
                self._stats.prefix_hits += hit

    def _judge(self, request: Request, drafted: int, accepted: int) -> None:
        assert request.drafter is not None
        request.drafter.judge(drafted, accepted)
        self._stats.drafts += 1
        self._stats.drafted_tokens += drafted
        self._stats.accepted_tokens += accepted

    def _next_in_line(self) -> Request | None:
        while self._waiting:
            request = self._waiting[0][1]
            if self._requests.get(request.id) is request:
                return request
            heapq.heappop(self._waiting)
        return None

    def _preempt(self, request: Request) -> None:
        self._leave_batch(request)
        request.computed = 0
        heapq.heappush(self._waiting, (request.order, request))
        self._stats.preemptions += 1

    def _leave(self, request: Request) -> None:
        del self._requests[request.id]
        if request.blocks:
            self._leave_batch(request)
        elif len(self._waiting) > 2 * (len(self._requests) - len(self._running)):
            self._drop_gone()

    def _drop_gone(self) -> None:
        """Take those that are gone out of the heap; done once they are half of it, this costs little for each."""
        self._waiting = [item for item in self._waiting if self._requests.get(item[1].id) is item[1]]
        heapq.heapify(self._waiting)

    def _leave_batch(self, request: Request) -> None:
        self._running.remove(request)
        self.pool.release(request.blocks)
        request.blocks = []
        self._removed.append(request.id)

    def _extend(self, sampled: Sampled, drafted: int) -> SequenceOutput:
        request = self._requests[sampled.request_id]
        if sampled.error is not None:
            self._leave(request)
            return SequenceOutput(request.id, [], "error", error=sampled.error)
        taken = 0
        finish_reason, stop_reason = None, None
        while taken < len(sampled.tokens) and finish_reason is None:
            finish_reason, stop_reason = request.append(sampled.tokens[taken], self.limits.max_model_len)
            taken += 1
        request.computed += taken - 1  # the draft's right tokens
        if drafted:
            self._judge(request, drafted, len(sampled.tokens) - 1)
        output = SequenceOutput(
            request.id,
            sampled.tokens[:taken],
            finish_reason,
            stop_reason,
            logprobs=None if sampled.logprobs is None else sampled.logprobs[:taken],
            cached_tokens=request.cached_tokens or 0,
            scheduled_at=request.scheduled_at,
        )
        if request.wants_prompt_logprobs:
            output.prompt_logprobs, request.prompt_reported = request.prompt_logprobs, True
        if finish_reason is not None:
            self._leave(request)
        return output
