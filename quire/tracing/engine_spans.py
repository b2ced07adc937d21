"""Spans of the steps that an engine ran for a request, made in the engine's thread or process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from quire.engine.client.protocol import AddRequest, ErrorOutput, RequestOutput, TokensOutput
from quire.engine.client.step_observer import StepObserver, StepShare
from quire.engine.client.trace_context import TraceContext
from quire.tracing.span import Attributes, Span, SpanQueue, SpanTree
from quire.tracing.tracing import Sampler

_MOST_CHUNKS = 16  # of a prompt that have spans


@dataclass(slots=True)
class _Steps:
    """Steps of one request that are told as one.

    Attributes:
        seconds: from the beginning to the end of each of them, in total; steps in flight overlap.
        longest: seconds of the longest.
        sequences: of all of them, in total.
    """

    count: int = 0
    began: float = 0.0
    ended: float = 0.0
    seconds: float = 0.0
    longest: float = 0.0
    sequences: int = 0

    def add(self, began: float, ended: float, sequences: int) -> None:
        """Count a step."""
        self.count += 1
        self.began = self.began or began
        self.ended = ended
        self.seconds += ended - began
        self.longest = max(self.longest, ended - began)
        self.sequences += sequences


@dataclass(slots=True)
class _RunningRequest:
    context: TraceContext
    parent: TraceContext
    arrived: float
    chunks: list[Span] = field(default_factory=list)
    prefill_steps: int = 0
    decode: _Steps = field(default_factory=_Steps)
    samples: bool = False  # its prompt has been computed

    def span(self, ended: float, *, failed: bool) -> Span:
        """The span of the request, with its steps."""
        steps: Attributes = {
            "quire.prefill.steps": self.prefill_steps,
            "quire.decode.steps": self.decode.count,
        }
        span = Span("engine", self.arrived, ended, steps, [*self.chunks], failed=failed)
        if self.decode.count:
            attributes: Attributes = {
                "quire.steps": self.decode.count,
                "quire.steps.seconds": self.decode.seconds,
                "quire.steps.longest_seconds": self.decode.longest,
                "quire.steps.mean_sequences": self.decode.sequences / self.decode.count,
            }
            span.children.append(Span("decode_steps", self.decode.began, self.decode.ended, attributes))
        return span


class EngineSpans(StepObserver):
    """Follows the requests of one engine whose traces are sampled. There are as many as the engine has."""

    def __init__(self, sampler: Sampler, queue: SpanQueue) -> None:
        self._sampler = sampler
        self._queue = queue
        self._running: dict[str, _RunningRequest] = {}

    @override
    def on_add(self, message: AddRequest) -> None:
        if message.trace is not None:
            own = self._sampler.child(message.trace)
            self._running[message.request_id] = _RunningRequest(own, message.trace, time.monotonic())

    @override
    def on_step(
        self, shares: Sequence[StepShare], outputs: Sequence[RequestOutput], began: float, ended: float
    ) -> None:
        if not self._running:
            return
        tokens = sum(share.tokens for share in shares)
        for share in shares:
            if (request := self._running.get(share.request_id)) is None:
                continue
            if request.samples:
                request.decode.add(began, ended, len(shares))
                continue
            request.samples = share.samples
            request.prefill_steps += 1
            if len(request.chunks) < _MOST_CHUNKS:
                attributes: Attributes = {
                    "quire.tokens": share.tokens,
                    "quire.step.tokens": tokens,
                    "quire.step.sequences": len(shares),
                }
                request.chunks.append(Span("prefill_chunk", began, ended, attributes))
        for output in outputs:
            if not isinstance(output, TokensOutput) or output.finish_reason is not None:
                self._end(output.request_id, ended, failed=isinstance(output, ErrorOutput))

    @override
    def on_abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._end(request_id, time.monotonic())

    def _end(self, request_id: str, ended: float, *, failed: bool = False) -> None:
        request = self._running.pop(request_id, None)
        if request is None:
            return
        wall_offset = time.time_ns() - time.monotonic_ns()
        span = request.span(ended, failed=failed)
        self._queue.put(SpanTree(request.context, request.parent, wall_offset, span))
