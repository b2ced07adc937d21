"""The scheduler of models that encode audio in chunks, and generate some tokens or none at each frame (transducers)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from typing_extensions import override

from quire.engine.client.protocol import AddRequest, FinishReason, TokensOutput
from quire.engine.client.streaming import TransducerInfo
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.blocks import BlockPool
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import EncodedAudio, SampledTokens, StepPlan
from quire.engine.scheduling.streaming_request import StreamingRequest
from quire.engine.scheduling.streaming_scheduler import MAX_PIECE, StepBudget, StreamingScheduler


@dataclass(slots=True, eq=False)
class TransducerRequest(StreamingRequest):
    """One sequence. Its `frames` are single columns of features. Tokens are not kept: a session may last for hours.

    A frame of the encoder needs the columns up to its first one, and those of the frames before it.

    Attributes:
        chunk: number of columns of a chunk; the first chunk has `less` fewer of them.
        most_chunks: number of chunks of the longest piece.
        generated: number of tokens that are not blank.
    """

    chunk: int = 1
    less: int = 0
    most_chunks: int = 1
    generated: int = 0

    @property
    def ready(self) -> int:
        """Number of columns of the next piece: whole chunks, or the rest of the audio; 0 if too few have arrived."""
        left, less = self.frames - self.encoded, 0 if self.encoded else self.less
        chunks = (left + less) // self.chunk
        if self.complete and chunks < self.most_chunks:
            return left
        return max(0, min(chunks, self.most_chunks) * self.chunk - less)

    @property
    def has_ended(self) -> bool:
        """Whether all audio is encoded, and no more follows. No frame is open behind whole chunks."""
        return self.complete and self.encoded == self.frames


class TransducerScheduler(StreamingScheduler[TransducerRequest]):
    """Schedule pieces of audio. A sequence has a slot for its states, and no blocks."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        groups: BlockGroups,
        info: TransducerInfo,
        *,
        by_priority: bool = False,
    ) -> None:
        """Make a scheduler without requests.

        Args:
            limits: limits of steps and sequences; `encoder_compute_budget` and `max_model_len` are numbers of frames.
            pool: as many blocks as sequences, which are not used.
            groups: without groups of blocks.
            info: facts about the model.
            by_priority: requests with a smaller priority run first.
        """
        super().__init__(limits, pool, groups, by_priority=by_priority)
        self._info = info

    @override
    def _make(self, message: AddRequest, sort_key: tuple[int, ...], start: int) -> TransducerRequest:
        info = self._info
        return TransducerRequest(
            id=message.request_id,
            tokens=array("i"),
            params=message.params,
            sort_key=sort_key,
            start=start,
            chunk=info.chunk_frames * info.columns_per_frame,
            less=info.columns_per_frame - 1,
            most_chunks=max(1, MAX_PIECE // info.chunk_frames),
        )

    @override
    def _refusal(self, request: TransducerRequest, frames: int, *, last: bool) -> str | None:
        most = self.limits.max_model_len * self._info.columns_per_frame
        if frames > most:
            return f"the audio would have {frames} columns of features, but the context allows at most {most}"
        return "the audio is empty" if last and not frames else None

    @override
    def _can_enter(self, request: TransducerRequest) -> bool:
        return True  # there is a slot for each sequence of the batch

    @override
    def _schedule_sequence(self, plan: StepPlan, request: TransducerRequest, budget: StepBudget) -> bool:
        columns = request.ready
        frames = -(-columns // self._info.columns_per_frame)
        if not columns or (frames > budget.frames and budget.frames < self.limits.encoder_compute_budget):
            return False
        first, features = request.encoded, request.take(columns)
        plan.audio.append(EncodedAudio(request.id, first, features, last=request.has_ended))
        budget.frames -= frames
        return True

    @override
    def _append(self, request: TransducerRequest, sampled: SampledTokens) -> TokensOutput:
        room, count = request.sampling_params.max_tokens - request.generated, 0
        for count, token in enumerate(sampled.tokens, 1):  # noqa: B007 (used behind the loop)
            room -= token != self._info.blank_token
            if not room:
                break
        request.generated = request.sampling_params.max_tokens - room
        reason: FinishReason | None = "stop" if request.has_ended else None
        output = TokensOutput(
            request.id,
            sampled.tokens[:count],
            reason if room else "length",
            logprobs=None if sampled.logprobs is None else sampled.logprobs[:count],
            scheduled_at=request.scheduled_at,
        )
        if output.finish_reason is not None:
            self._leave(request)
        return output
