"""The scheduler of encoders: every request is computed whole, in one step, and holds no blocks."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from quire.engine.client.convolutions import count_positions
from quire.engine.client.protocol import AddRequest, ErrorOutput, PictureItem, PooledOutput, RequestOutput, StepStats
from quire.engine.scheduling.fair_queue import FairQueue
from quire.engine.scheduling.items import pixels_of
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import StepPlan, StepResult

_PATCH_PIXELS = 16 * 16  # of a usual patch of a picture
_URGENT_TOKENS = 64  # computed in a few milliseconds


class EncoderScheduler:
    """Pack waiting requests into steps, without padding; see `Scheduler` for the methods."""

    def __init__(self, limits: SchedulerLimits, *, by_priority: bool = False) -> None:
        self.limits = limits
        self._by_priority = by_priority
        self._waiting: FairQueue[str] = FairQueue()
        self._requests: dict[str, AddRequest] = {}
        self._running: dict[str, float] = {}  # when each request that is being computed was scheduled

    @property
    def has_work(self) -> bool:
        """Whether any request has not finished."""
        return bool(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, message: AddRequest) -> None:
        """Queue a new request."""
        self._requests[message.request_id] = message
        priority = message.priority if self._by_priority else 0
        self._waiting.push(message.request_id, _flow(message), self._size(message), priority)

    def abort(self, request_id: str) -> None:
        """Drop a request in any state; unknown ids are ignored."""
        self._requests.pop(request_id, None)

    def schedule(self) -> StepPlan:
        """Choose the requests of the next step: those that come next, up to the token budget, but at least one."""
        return self._take(self.limits.max_num_batched_tokens, at_least_one=True)

    def schedule_urgent(self, running: Iterable[StepPlan]) -> StepPlan:
        """Choose short requests to run beside running steps; skips flows that these already contain."""
        flows = {_flow(message) for plan in running for message in plan.encoder_requests}
        return self._take(_URGENT_TOKENS, at_least_one=False, without=flows)

    def _take(self, max_tokens: int, *, at_least_one: bool, without: Collection[str] = ()) -> StepPlan:
        plan = StepPlan()
        tokens = 0
        while (
            len(plan.encoder_requests) < self.limits.max_num_seqs and (request_id := self._waiting.peek()) is not None
        ):
            message = self._requests.get(request_id)
            if message is not None:
                fits = tokens + self._size(message) <= max_tokens or (at_least_one and not plan.encoder_requests)
                if not fits or _flow(message) in without:
                    break
                tokens += self._size(message)
                plan.encoder_requests.append(message)
                self._running[request_id] = time.monotonic()
            self._waiting.pop()
        plan.stats.step_tokens = tokens
        return plan

    def _size(self, message: AddRequest) -> int:
        """Tokens of a request, and about the positions of its audio and its pictures."""
        columns = (item.features.shape[1] for item in message.audio_items)
        positions = sum(count_positions(self.limits.convolutions, count) for count in columns)
        pixels = (pixels_of(item) for item in message.items if isinstance(item, PictureItem))
        return len(message.prompt) + positions + sum(count // _PATCH_PIXELS for count in pixels)

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Apply the results of a step; returns the outputs for the front end."""
        outputs: list[RequestOutput] = []
        for request_id in (message.request_id for message in plan.encoder_requests):
            scheduled_at = self._running.pop(request_id)
            if self._requests.pop(request_id, None) is None:
                continue  # aborted
            if (error := result.errors.get(request_id)) is not None:
                plan.stats.corrupted += error.corrupted
                outputs.append(ErrorOutput(request_id, error.message, error.invalid))
            else:
                outputs.append(PooledOutput(request_id, result.pooled[request_id], 0, scheduled_at))
        return outputs

    def stats(self, plan: StepPlan | None = None) -> StepStats:
        """Gauges as of now, with the counters of a step that has finished if one is given."""
        stats = StepStats() if plan is None else plan.stats
        stats.running = sum(request_id in self._requests for request_id in self._running)
        stats.waiting = len(self._requests) - stats.running
        return stats

    def check(self) -> None:
        """Assert that queue and requests are consistent."""
        known = len(self._waiting) + len(self._running)
        assert known >= len(self._requests), "a request is neither waiting nor running"


def _flow(message: AddRequest) -> str:
    return message.flow or message.request_id
