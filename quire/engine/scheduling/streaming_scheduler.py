"""StreamingScheduler: the base of the schedulers of models that transcribe audio while it arrives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from quire.engine.client.protocol import (
    AddRequest,
    ErrorOutput,
    MediaItem,
    RequestOutput,
    StepStats,
    TokensOutput,
    only_audio,
)
from quire.engine.scheduling.block_tables import BlockGroups, BlockTables
from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import SampledTokens, StepPlan, StepResult
from quire.engine.scheduling.streaming_request import StreamingRequest
from quire.engine.scheduling.waiting import WaitingQueue

MAX_PIECE = 64  # frames of a sequence that a step encodes: few enough for other sequences, and enough for the kernels
_TOKENS_PER_FRAME = 4  # cost of encoding a frame, in tokens of a step's budget; an estimate
_SORT_KEY = attrgetter("sort_key")
R = TypeVar("R", bound=StreamingRequest)


@dataclass(slots=True)
class StepBudget:
    """The tokens and frames of audio that a step may still compute, if they are of more than one sequence."""

    tokens: int
    frames: int


class StreamingScheduler(ABC, Generic[R]):
    """Schedule sequences whose audio arrives while they are computed; see `Scheduler` for the methods.

    There is no preemption: a sequence that has entered the batch keeps its place and its state until it ends, because
    recomputation would need all of its audio. Requests without audio hold nothing and are not in the queue.

    Sequences that have waited longest are scheduled first, and new ones enter the batch although a step may have no
    room for them: a few long files could otherwise fill each step while a live session waits.
    """

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, groups: BlockGroups, *, by_priority: bool) -> None:
        """Make a scheduler without requests.

        Args:
            limits: limits of steps and sequences; `encoder_compute_budget` is a number of frames.
            pool: the blocks of sequences.
            groups: what takes them.
            by_priority: requests with a smaller priority run first.
        """
        self.limits = limits
        self.pool = pool
        self._groups = groups
        self._tables = BlockTables(pool, groups, None)
        self._requests: dict[str, R] = {}
        self._running: list[R] = []  # sorted by sort key
        self._no_audio: set[str] = set()  # ids of those that wait for their first frame, outside of the queue
        self._waiting = WaitingQueue(self._requests, by_priority=by_priority, fair=False)
        self._in_flight: deque[list[R]] = deque()  # the sequences of each plan that has not finished
        self._removed: list[str] = []  # left the batch since the last plan
        self._steps = 0
        self._ended: list[RequestOutput] = []  # of requests that have ended without a step

    @abstractmethod
    def _make(self, message: AddRequest, sort_key: tuple[int, ...], start: int) -> R:
        """The state of a new request, without audio."""

    @abstractmethod
    def _refusal(self, request: R, frames: int, *, last: bool) -> str | None:
        """Why audio cannot be appended to a request, which would have `frames` frames then; None if it can."""

    @abstractmethod
    def _can_enter(self, request: R) -> bool:
        """Whether there is memory for a request to enter the batch."""

    @abstractmethod
    def _schedule_sequence(self, plan: StepPlan, request: R, budget: StepBudget) -> bool:
        """Schedule as much of a sequence as possible; returns whether that is anything."""

    @abstractmethod
    def _append(self, request: R, sampled: SampledTokens) -> TokensOutput:
        """Append generated tokens; a request that ends leaves."""

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        if self._removed or self._ended or self._next() is not None:
            return True
        return any(request.ready > 0 and not request.steps_in_flight for request in self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, message: AddRequest) -> None:
        """Queue a new request, which the core has validated."""
        request = self._make(message, *self._waiting.assign_sort_key(message))
        request.receive(message.audio_items, last=not message.open)
        self._requests[request.id] = request
        if request.frames:
            self._waiting.push(request)
        else:
            self._no_audio.add(request.id)

    def extend(
        self, request_id: str, tokens: list[int], *, last: bool, items: tuple[MediaItem, ...] = ()
    ) -> str | None:
        """Append audio to an open request; unknown ids are ignored.

        Returns:
            The error, if audio cannot be appended: the request is dropped then. None if it was appended.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        audio = only_audio(items)
        frames = request.frames + sum(item.features.shape[1] for item in audio) // request.columns_per_frame
        if tokens:
            error: str | None = "only audio can be appended to the request: the model generates the tokens"
        elif request.complete:
            error = "the audio is already complete"
        else:
            error = self._refusal(request, frames, last=last)
        if error is not None:
            self._leave(request)
            return error
        request.receive(audio, last=last)
        if request.frames and request.id in self._no_audio:
            self._no_audio.remove(request.id)
            self._waiting.push(request)
        if request.has_ended and not request.steps_in_flight:
            self._ended.append(TokensOutput(request.id, [], "stop", scheduled_at=request.scheduled_at))
            self._leave(request)
        return None

    def abort(self, request_id: str) -> None:
        """Drop a request in any state; unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._leave(request)

    def schedule(self) -> StepPlan:
        """Choose the sequences of the next step, by priority and by the time that they have waited."""
        plan, scheduled = StepPlan(), list[R]()
        while (entering := self._next()) is not None:
            self._enter(plan, entering)
        self._steps += 1
        budget = StepBudget(self.limits.max_num_batched_tokens, self.limits.encoder_compute_budget)
        # The first part of a sort key is the priority.
        for request in sorted(self._running, key=lambda running: (running.sort_key[0], running.last_step)):
            if not request.steps_in_flight and self._schedule_sequence(plan, request, budget):
                scheduled.append(request)
                request.steps_in_flight += 1
                request.last_step = self._steps
        plan.removed, self._removed = self._removed, []
        if scheduled:
            self._in_flight.append(scheduled)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Apply the results of the oldest step in flight; returns the outputs for the front end."""
        live: dict[str, R] = {}
        for request in self._in_flight.popleft() if plan.scheduled or plan.audio else ():
            request.steps_in_flight -= 1
            if self._requests.get(request.id) is request:  # else aborted
                live[request.id] = request
        outputs, self._ended = self._ended, []
        for request_id, error in result.errors.items():
            if request_id in live:
                self._leave(live.pop(request_id))
                plan.stats.corrupted += error.corrupted
                outputs.append(ErrorOutput(request_id, error.message, error.invalid))
        for sampled in result.sampled:
            if (live_request := live.get(sampled.request_id)) is not None:
                outputs.append(self._append(live_request, sampled))
                plan.stats.step_tokens += len(sampled.tokens)
        return outputs

    def stats(self, plan: StepPlan | None = None) -> StepStats:
        """Gauges as of now, with the counters of a step that has finished if one is given."""
        stats = StepStats() if plan is None else plan.stats
        stats.running, stats.waiting = len(self._running), len(self._requests) - len(self._running)
        stats.deferred = len(self._no_audio)
        stats.blocks_used, stats.blocks_total = self._tables.usage(stats.running)
        return stats

    def check(self) -> None:
        """Assert that queue, requests and blocks are consistent."""
        waiting, running = self._waiting.ids(), {request.id for request in self._running}
        assert waiting | running | self._no_audio == set(self._requests), "a request is neither waiting nor running"
        assert len(waiting) + len(running) + len(self._no_audio) == len(self._requests), "a request is in two states"
        assert self._running == sorted(self._running, key=_SORT_KEY), "running requests are out of order"
        self._tables.check(self._requests.values(), running)

    def _enter(self, plan: StepPlan, request: R) -> None:
        """Take the first waiting request, the result of `_next`, into the batch."""
        self._waiting.pop()
        self._tables.enter(request)
        insort(self._running, request, key=_SORT_KEY)
        request.mark_scheduled()
        plan.new.append(request.to_new_sequence(None))

    def _next(self) -> R | None:
        """The waiting request that can enter the batch now; None if there is none."""
        if len(self._running) >= self.limits.max_num_seqs:
            return None
        first = self._waiting.first()
        if first is None:
            return None
        request = self._requests[first.id]
        return request if self._can_enter(request) else None

    def _leave(self, request: R) -> None:
        self._tables.leave(request)
        del self._requests[request.id]
        self._no_audio.discard(request.id)
        if request in self._running:
            self._running.remove(request)
            self._removed.append(request.id)
        else:
            self._waiting.compact(len(self._requests) - len(self._running))


def frame_budget(max_num_batched_tokens: int) -> int:
    """Number of frames of audio that a step encodes, from its number of tokens."""
    return max(MAX_PIECE, max_num_batched_tokens // _TOKENS_PER_FRAME)
