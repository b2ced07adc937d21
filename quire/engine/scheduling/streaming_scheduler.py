"""The scheduler of models that read a frame of audio with each token (streaming audio models)."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import EncodedAudio, SampledTokens, ScheduledSequence, StepPlan, StepResult
from quire.engine.scheduling.streaming_request import StreamingRequest
from quire.engine.scheduling.waiting import WaitingQueue
from quire.engine.wire.protocol import AddRequest, ErrorOutput, MediaItem, RequestOutput, StepStats, TokensOutput

MAX_PIECE = 64  # frames of a sequence that a step encodes: few enough for other sequences, and enough for the kernels
_ORDER = attrgetter("order")


@dataclass(slots=True)
class _Budget:
    """The tokens and frames of audio that a step may still compute, if they are of more than one sequence."""

    tokens: int
    frames: int


class StreamingScheduler:
    """Schedules sequences whose tokens read audio that arrives while they are generated; see `Scheduler`.

    There is no preemption: a sequence keeps its row, its blocks and its encoder state until it ends, because
    recomputation would need all of its audio. So it enters the batch only if the most blocks that it can need are not
    reserved by others. With a sliding window these are few: blocks outside the window are freed.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        *,
        columns_per_frame: int,
        window: int | None,
        by_priority: bool = False,
    ) -> None:
        """Make a scheduler without requests.

        Args:
            limits: limits of steps and sequences; `max_encoded` is a number of frames.
            pool: the blocks of the KV cache, at least `most_blocks` of the longest sequence.
            columns_per_frame: number of columns of features of a frame.
            window: number of positions that a token attends to, including its own; None: all.
            by_priority: requests with a smaller priority run first.
        """
        self.limits = limits
        self.pool = pool
        self._columns_per_frame = columns_per_frame
        self._window = window
        self._requests: dict[str, StreamingRequest] = {}
        self._running: list[StreamingRequest] = []  # sorted by order
        self._no_audio: set[str] = set()  # ids of those that wait for their first frame, outside of the queue
        self._waiting = WaitingQueue(self._requests, by_priority=by_priority, fair=False)
        self._in_flight: deque[list[StreamingRequest]] = deque()  # the sequences of each plan that has not finished
        self._removed: list[str] = []  # left the batch since the last plan
        self._ended: list[RequestOutput] = []  # of requests that have ended without a step

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
        order, start = self._waiting.place(message)
        request = StreamingRequest(
            id=message.request_id,
            tokens=message.prompt.tolist(),
            params=message.params,
            order=order,
            start=start,
            columns_per_frame=self._columns_per_frame,
        )
        request.receive(message.items, last=not message.open)
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
        frames = request.frames + sum(item.features.shape[1] for item in items) // self._columns_per_frame
        if (error := self._refusal(request, tokens, frames, last=last)) is not None:
            self._leave(request)
            return error
        request.receive(items, last=last)
        if request.frames and request.id in self._no_audio:
            self._no_audio.remove(request.id)
            self._waiting.push(request)
        if request.has_ended and not request.steps_in_flight:
            self._ended.append(TokensOutput(request.id, [], "stop", scheduled_at=request.scheduled_at))
            self._leave(request)
        return None

    def _refusal(self, request: StreamingRequest, tokens: list[int], frames: int, *, last: bool) -> str | None:
        """Why audio cannot be appended to a request, which would have `frames` frames then; None if it can."""
        if tokens:
            return "only audio can be appended to the request: its tokens are those of the prompt and those generated"
        if request.complete:
            return "the audio is already complete"
        if frames > self.limits.max_model_len:
            return f"the audio would have {frames} frames, but the context allows at most {self.limits.max_model_len}"
        if last and frames <= request.prompt_len:
            return f"the audio ends after {frames} frames; there must be more than the prompt's {request.prompt_len}"
        return None

    def abort(self, request_id: str) -> None:
        """Drop a request in any state; unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._leave(request)

    def schedule(self) -> StepPlan:
        """Choose the sequences of the next step: first those in the batch, then waiting ones."""
        plan, scheduled = StepPlan(), list[StreamingRequest]()
        budget = _Budget(self.limits.max_tokens, self.limits.max_encoded)
        for request in self._running:
            if not request.steps_in_flight:
                self._schedule_sequence(plan, scheduled, request, budget)
        while budget.tokens > 0 and budget.frames > 0 and (entering := self._next()) is not None:
            self._waiting.pop()
            insort(self._running, entering, key=_ORDER)
            entering.mark_scheduled()
            plan.new.append(entering.enter(None))
            self._schedule_sequence(plan, scheduled, entering, budget)
        plan.removed, self._removed = self._removed, []
        if scheduled:
            self._in_flight.append(scheduled)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Apply the results of the oldest step in flight; returns the outputs for the front end."""
        live: dict[str, StreamingRequest] = {}
        for request in self._in_flight.popleft() if plan.scheduled else ():
            request.steps_in_flight -= 1
            if self._requests.get(request.id) is request:  # else aborted
                live[request.id] = request
        outputs, self._ended = self._ended, []
        for request_id, error in result.errors.items():
            if request_id in live:
                self._leave(live.pop(request_id))
                outputs.append(ErrorOutput(request_id, error.message, error.invalid))
        for sampled in result.sampled:
            if (found := live.get(sampled.request_id)) is not None:
                outputs.append(self._append(found, sampled))
                plan.stats.step_tokens += 1
        return outputs

    def stats(self, plan: StepPlan | None = None) -> StepStats:
        """Gauges as of now, with the counters of a step that has finished if one is given."""
        stats = StepStats() if plan is None else plan.stats
        stats.running, stats.waiting = len(self._running), len(self._requests) - len(self._running)
        stats.blocks_used, stats.blocks_total = self.pool.num_used, self.pool.num_blocks
        return stats

    def check(self) -> None:
        """Assert that queue, requests and the block pool are consistent."""
        self.pool.check([request.blocks for request in self._requests.values()])
        waiting, running = self._waiting.ids(), {request.id for request in self._running}
        assert waiting | running | self._no_audio == set(self._requests), "a request is neither waiting nor running"
        assert len(waiting) + len(running) + len(self._no_audio) == len(self._requests), "a request is in two states"
        assert self._running == sorted(self._running, key=_ORDER), "running requests are out of order"
        for request in self._requests.values():
            held = (request.dropped + len(request.blocks)) * self.pool.block_size
            assert request.computed <= min(held, request.encoded), "computed tokens without a block or audio"
            assert request.id in running or not request.blocks, "a waiting request holds blocks"
            assert len(request.blocks) <= self._most_blocks(request), "a request holds more blocks than reserved"

    def _next(self) -> StreamingRequest | None:
        """The waiting request that can enter the batch now; None if there is none."""
        if len(self._running) >= self.limits.max_seqs:
            return None
        request = self._waiting.first()
        if request is None:
            return None
        assert isinstance(request, StreamingRequest)
        reserved = sum(map(self._most_blocks, self._running))
        return request if reserved + self._most_blocks(request) <= self.pool.num_blocks else None

    def _most_blocks(self, request: StreamingRequest) -> int:
        length = min(request.frames, self.limits.max_model_len) if request.complete else self.limits.max_model_len
        return most_blocks(self.limits, length, self._window, self.pool.block_size)

    def _schedule_sequence(
        self, plan: StepPlan, scheduled: list[StreamingRequest], request: StreamingRequest, budget: _Budget
    ) -> None:
        """Schedule as many tokens of a sequence as possible, and the encoding of further audio if they need it."""
        count = min(request.ready, budget.tokens, MAX_PIECE)
        if count > 0 and request.computed + count > request.encoded:
            self._encode(plan, request, budget)
        count = min(count, request.encoded - request.computed)
        if count <= 0:
            return
        start, end = request.computed, request.computed + count
        self._drop_blocks(request)
        fresh = self.pool.allocate(self.pool.blocks_for(end) - request.dropped - len(request.blocks))
        request.blocks += fresh
        samples = end == len(request.tokens)
        plan.scheduled.append(ScheduledSequence(request.id, start, count, tuple(fresh), samples))
        scheduled.append(request)
        request.computed = end
        request.steps_in_flight += 1
        budget.tokens -= count
        plan.stats.step_tokens += max(0, min(end, request.prompt_len) - start)

    def _encode(self, plan: StepPlan, request: StreamingRequest, budget: _Budget) -> None:
        """Schedule the encoding of the next piece of audio, which may be more than this step needs."""
        frames = min(request.frames - request.encoded, MAX_PIECE)
        if frames <= budget.frames or budget.frames == self.limits.max_encoded:
            first = request.encoded
            plan.audio.append(EncodedAudio(request.id, first, request.take(frames)))
            budget.frames -= frames

    def _drop_blocks(self, request: StreamingRequest) -> None:
        """Free the blocks outside the window of the next token."""
        if self._window is None:
            return
        unseen = max(0, request.computed - self._window + 1) // self.pool.block_size - request.dropped
        if unseen > 0:
            self.pool.release(request.blocks[:unseen])
            request.blocks = request.blocks[unseen:]
            request.dropped += unseen

    def _append(self, request: StreamingRequest, sampled: SampledTokens) -> TokensOutput:
        reason, stop = request.append(sampled.tokens[0], self.limits.max_model_len)
        output = TokensOutput(
            request.id,
            sampled.tokens[:1],
            reason,
            stop,
            logprobs=sampled.logprobs,
            scheduled_at=request.scheduled_at,
        )
        if reason is not None:
            self._leave(request)
        return output

    def _leave(self, request: StreamingRequest) -> None:
        del self._requests[request.id]
        self._no_audio.discard(request.id)
        if request in self._running:
            self._running.remove(request)
            self.pool.release(request.blocks)
            request.blocks = []
            self._removed.append(request.id)
        else:
            self._waiting.compact(len(self._requests) - len(self._running))


def most_blocks(limits: SchedulerLimits, length: int, window: int | None, block_size: int) -> int:
    """The most blocks that a sequence holds: those in the windows of the tokens of a step.

    Args:
        limits: limits of steps.
        length: number of tokens of the sequence.
        window: see `StreamingScheduler`.
        block_size: number of tokens of a block.
    """
    whole = -(-length // block_size)
    if window is None:
        return whole
    seen = window - 1 + min(limits.max_tokens, MAX_PIECE)
    return min(whole, -(-seen // block_size) + 1)
