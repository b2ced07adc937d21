"""The scheduler of models that read a frame of audio with each token (delayed streams)."""

from __future__ import annotations

from typing_extensions import override

from quire.engine.client.protocol import AddRequest, TokensOutput
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import EncodedAudio, SampledTokens, ScheduledSequence, StepPlan
from quire.engine.scheduling.request import token_array
from quire.engine.scheduling.streaming_request import StreamingRequest
from quire.engine.scheduling.streaming_scheduler import MAX_PIECE, StepBudget, StreamingScheduler


class DelayedStreamsScheduler(StreamingScheduler[StreamingRequest]):
    """Schedule sequences whose tokens read audio that arrives while they are generated.

    A sequence enters the batch only if the most blocks that it can need are not reserved by others. With a sliding
    window these are few: blocks outside the window are freed.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        groups: BlockGroups,
        *,
        columns_per_frame: int,
        by_priority: bool = False,
    ) -> None:
        """Make a scheduler without requests.

        Args:
            limits: limits of steps and sequences; `encoder_compute_budget` is a number of frames.
            pool: the blocks of the KV cache, as many as the longest sequence holds.
            groups: the groups of layers that take them.
            columns_per_frame: number of columns of features of a frame.
            by_priority: requests with a smaller priority run first.
        """
        super().__init__(limits, pool, groups, by_priority=by_priority)
        self._columns_per_frame = columns_per_frame

    @override
    def check(self) -> None:
        super().check()
        for request in self._requests.values():
            assert request.num_computed_tokens <= request.encoded, "computed tokens without audio"
            held = sum(map(len, request.tables)) - sum(request.unseen)
            assert held <= self._most_blocks(request), "a request holds more blocks than reserved"

    @override
    def _make(self, message: AddRequest, sort_key: tuple[int, ...], start: int) -> StreamingRequest:
        return StreamingRequest(
            id=message.request_id,
            tokens=token_array(message.prompt),
            params=message.params,
            sort_key=sort_key,
            start=start,
            columns_per_frame=self._columns_per_frame,
        )

    @override
    def _refusal(self, request: StreamingRequest, frames: int, *, last: bool) -> str | None:
        if frames > self.limits.max_model_len:
            return f"the audio would have {frames} frames, but the context allows at most {self.limits.max_model_len}"
        if last and frames <= request.prompt_len:
            return f"the audio ends after {frames} frames; there must be more than the prompt's {request.prompt_len}"
        return None

    @override
    def _can_enter(self, request: StreamingRequest) -> bool:
        reserved = sum(map(self._most_blocks, self._running))
        return reserved + self._most_blocks(request) <= self.pool.num_blocks

    def _most_blocks(self, request: StreamingRequest) -> int:
        length = min(request.frames, self.limits.max_model_len) if request.complete else self.limits.max_model_len
        return self._groups.most_blocks(length, largest_piece(self.limits), self.pool.block_size)

    @override
    def _schedule_sequence(self, plan: StepPlan, request: StreamingRequest, budget: StepBudget) -> bool:
        """Schedule as many tokens of a sequence as possible, and the encoding of further audio if they need it."""
        count = min(request.ready, budget.tokens, MAX_PIECE)
        if count > 0 and request.num_computed_tokens + count > request.encoded:
            self._encode(plan, request, budget)
        count = min(count, request.encoded - request.num_computed_tokens)
        if count <= 0:
            return False
        start, end = request.num_computed_tokens, request.num_computed_tokens + count
        self._tables.drop_unseen(request)
        new_blocks = self._tables.grow(request, end)
        samples = end == len(request.tokens)
        plan.scheduled.append(ScheduledSequence(request.id, start, count, new_blocks, samples))
        request.num_computed_tokens = end
        budget.tokens -= count
        plan.stats.step_tokens += max(0, min(end, request.prompt_len) - start)
        return True

    def _encode(self, plan: StepPlan, request: StreamingRequest, budget: StepBudget) -> None:
        """Schedule the encoding of the next piece of audio, which may be more than this step needs."""
        frames = min(request.frames - request.encoded, MAX_PIECE)
        if frames <= budget.frames or budget.frames == self.limits.encoder_compute_budget:
            first = request.encoded
            plan.audio.append(EncodedAudio(request.id, first, request.take(frames)))
            budget.frames -= frames

    @override
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


def largest_piece(limits: SchedulerLimits) -> int:
    """Return the most tokens of a sequence that a step computes."""
    return min(limits.max_num_batched_tokens, MAX_PIECE)
