"""The scheduler of encoders: every request is computed whole, in one step, and holds no blocks."""

from __future__ import annotations

import time
from collections import deque

from quire.engine.scheduling.fair_queue import FairQueue
from quire.engine.scheduling.plan import StepPlan, StepResult
from quire.engine.scheduling.scheduler import SchedulerLimits
from quire.engine.wire.protocol import AddRequest, ErrorOutput, PooledOutput, RequestOutput, StepStats


class EncoderScheduler:
    """Packs waiting requests into steps, without padding; see `Scheduler` for the methods."""

    def __init__(self, limits: SchedulerLimits, *, by_priority: bool = False) -> None:
        self.limits = limits
        self._by_priority = by_priority
        self._waiting: FairQueue[str] = FairQueue()
        self._requests: dict[str, AddRequest] = {}
        self._in_flight: deque[dict[str, float]] = deque()  # when each request of a step was scheduled

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
        self._waiting.push(message.request_id, message.flow or message.request_id, len(message.prompt), priority)

    def abort(self, request_id: str) -> None:
        """Drop a request in any state; unknown ids are ignored."""
        self._requests.pop(request_id, None)

    def plan(self) -> StepPlan:
        """Choose the requests of the next step: those that come next, up to `max_tokens` tokens, but at least one."""
        plan = StepPlan()
        tokens = 0
        while len(plan.whole) < self.limits.max_seqs and (request_id := self._waiting.peek()) is not None:
            message = self._requests.get(request_id)
            if message is not None:
                if plan.whole and tokens + len(message.prompt) > self.limits.max_tokens:
                    break
                tokens += len(message.prompt)
                plan.whole.append(message)
            self._waiting.pop()
        plan.stats.step_tokens = tokens
        if plan.whole:
            now = time.monotonic()
            self._in_flight.append({message.request_id: now for message in plan.whole})
        return plan

    def finish(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Apply the results of the oldest plan that has not finished; returns what to send to the front end."""
        outputs: list[RequestOutput] = []
        if not plan.whole:
            return outputs
        for request_id, scheduled_at in self._in_flight.popleft().items():
            if self._requests.pop(request_id, None) is None:
                continue  # aborted
            if (error := result.errors.get(request_id)) is not None:
                outputs.append(ErrorOutput(request_id, error.message, error.invalid))
            else:
                outputs.append(PooledOutput(request_id, result.pooled[request_id], 0, scheduled_at))
        return outputs

    def stats(self, plan: StepPlan | None = None) -> StepStats:
        """Gauges as of now, with the counters of a step that has finished if one is given."""
        stats = StepStats() if plan is None else plan.stats
        stats.running = sum(request_id in self._requests for step in self._in_flight for request_id in step)
        stats.waiting = len(self._requests) - stats.running
        return stats

    def check(self) -> None:
        """Assert that queue and requests are consistent."""
        in_flight = sum(request_id in self._requests for step in self._in_flight for request_id in step)
        assert len(self._waiting) + in_flight >= len(self._requests), "a request is neither waiting nor running"
