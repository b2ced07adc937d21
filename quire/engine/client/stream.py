"""Streams from the client to the code that made a request: token deltas, or one pooled array."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from typing_extensions import override

from quire.engine.client.deadline import Deadline
from quire.engine.client.detokenizer import Detokenizer, TextParams
from quire.engine.client.errors import BlocksNotRead, EngineError, RequestFailed, RequestRefused
from quire.engine.client.kv_transfer import RemoteBlocks
from quire.engine.client.origin import Origin, current_origin
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import (
    AddRequest,
    ErrorOutput,
    FinishReason,
    PooledArray,
    PooledOutput,
    RequestFields,
    RequestOutput,
    TokenArray,
    TokenLogprobs,
    TokensOutput,
)
from quire.engine.client.records import RequestRecord, SequenceGroup
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.timeline import RequestTimes


class EngineRequest(RequestFields, frozen=True, kw_only=True):
    """What requests of both kinds have.

    Attributes:
        prompt: token ids, 1-D int32.
        deadline: when the request fails with `DeadlineExceeded`.
        origin: the HTTP request that it is part of.
        rendered: see `RequestTimes`.
    """

    prompt: TokenArray
    deadline: Deadline = msgspec.field(default_factory=Deadline)
    origin: Origin = msgspec.field(default_factory=current_origin)
    rendered: float = msgspec.field(default_factory=time.monotonic)

    def new_times(self) -> RequestTimes:
        """Return the times of the request, which is sent to the engine now."""
        return RequestTimes(self.origin.arrived, self.rendered, time.monotonic())


class GenerateRequest(EngineRequest, frozen=True, kw_only=True):
    """One sequence to generate. If it is open, the rest is sent with `Engine.extend`.

    Attributes:
        request_id: id of this request in the engine; None for a new one. Required if it is open.
        group: the sequences of the request with this prompt, for metrics; shared by them.
        is_search_step: see `RequestRecord`.
    """

    params: SamplingParams
    text: TextParams = msgspec.field(default_factory=TextParams)
    request_id: str | None = None
    group: SequenceGroup = msgspec.field(default_factory=SequenceGroup)
    is_search_step: bool = False


class PoolRequest(EngineRequest, frozen=True, kw_only=True):
    """One prompt whose hidden states are pooled."""

    params: PoolingParams


@dataclass(frozen=True, slots=True)
class Pooled:
    """The result of a `PoolRequest`; `data` is float32, whose shape depends on `PoolingParams.task`."""

    data: PooledArray
    cached_tokens: int
    times: RequestTimes


@dataclass(slots=True)
class Delta:
    """The new part of a sequence since the last delta. Steps that the reader did not fetch in time are merged.

    Attributes:
        token_probs: see `SamplingParams.token_probs`; in the first delta.
        times: times of the whole sequence; set in its last delta.
        held_blocks: what is kept for another engine; in the last delta.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_probs: list[float] | None = None
    times: RequestTimes | None = None
    held_blocks: RemoteBlocks | None = None


class OutputStream(Protocol):
    """The interface of a request's stream for the client.

    Attributes:
        request: what the stream is of.
        finished_by_core: the core holds nothing of the request any more. A stop string, found here, leaves this False.
        ended: called once when the core holds nothing of the request any more.
    """

    request: EngineRequest
    times: RequestTimes
    finish_reason: FinishReason | None
    finished_by_core: bool
    ended: Callable[[], None] | None

    def put(self, output: RequestOutput) -> None:
        """Take the request's output of one step."""

    def fail(self, error: EngineError) -> None:
        """Raise `error` in the reader, after it has read the pending deltas."""

    def record(self, request_id: str) -> RequestRecord:
        """The finished request, for observers; without a finish reason it was aborted. `request_id`: in the engine."""


class SequenceStream(OutputStream):
    """The deltas of one sequence; one reader takes them with `next`.

    Attributes:
        beginning: the first characters of its text, for the log; None: they are not kept.
    """

    def __init__(
        self, request: GenerateRequest, detokenizer: Detokenizer, ended: Callable[[], None] | None = None
    ) -> None:
        self.request: GenerateRequest = request
        self.ended = ended
        self.times = request.new_times()
        self.output_tokens = 0
        self.cached_tokens = self.loaded_tokens = 0
        self.preemptions = 0
        self.prefill_chunks = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.finished_by_core = False
        self.beginning: str | None = None
        self._kept = 0  # characters of `beginning` that are wanted
        self._detokenizer = detokenizer
        self._pending: Delta | None = None  # without its text
        self._texts: list[str] = []  # of the pending delta
        self._error: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def keep_beginning(self, length: int) -> None:
        """Keep so many characters of the text."""
        self.beginning, self._kept = "", length

    async def next(self) -> Delta:
        """Wait for the next delta.

        Raises:
            RequestRefused: the core does not accept the request.
            RequestFailed: the engine failed while it ran the request.
            BlocksNotRead: another engine did not send the blocks of the prompt.
            EngineDead: the engine has stopped.
        """
        while self._pending is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        delta, self._pending = self._pending, None
        delta.text, self._texts = "".join(self._texts), []
        return delta

    @override
    def put(self, output: RequestOutput) -> None:
        if not isinstance(output, TokensOutput):
            self.finished_by_core = isinstance(output, ErrorOutput)
            self.fail(error_of(output, TokensOutput))
            return
        before = self._detokenizer.tokens_used
        reason = output.finish_reason
        text = self._detokenizer.push(output.token_ids, last=reason is not None, stopped=reason == "stop")
        used = self._detokenizer.tokens_used - before
        self.output_tokens += used
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        self.loaded_tokens = output.loaded_tokens
        self.preemptions = output.preemptions
        self.prefill_chunks = output.prefill_chunks
        self.draft_tokens, self.accepted_tokens = output.draft_tokens, output.accepted_tokens
        delta = self._pending or Delta(cached_tokens=self.cached_tokens)
        self._texts.append(text)
        if self.beginning is not None and len(self.beginning) < self._kept:
            self.beginning = (self.beginning + text)[: self._kept]
        delta.token_ids += output.token_ids[:used]
        if output.logprobs is not None:
            delta.logprobs += output.logprobs[:used]
        delta.prompt_logprobs = output.prompt_logprobs or delta.prompt_logprobs
        delta.token_probs = output.token_probs or delta.token_probs
        delta.held_blocks = output.held_blocks
        if self._detokenizer.matched is not None:
            delta.finish_reason, delta.stop_reason = "stop", self._detokenizer.matched
        elif reason is not None:
            delta.finish_reason, delta.stop_reason = reason, output.stop_reason
        self.finished_by_core = reason is not None
        self.finish_reason = delta.finish_reason
        delta.times = None if self.finish_reason is None else self.times
        self._pending = delta
        self._wake()

    @override
    def fail(self, error: EngineError) -> None:
        self.finish_reason = "error"
        self._error = error
        self._wake()

    @override
    def record(self, request_id: str) -> RequestRecord:
        group = self.request.group
        last = group.end(self.output_tokens, self.cached_tokens)
        return RequestRecord(
            kind="generate",
            request_id=request_id,
            origin=self.request.origin,
            times=self.times,
            finish_reason=self.finish_reason or "abort",
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            max_tokens=self.request.params.max_tokens,
            preemptions=self.preemptions,
            answers=group.size if last else 0,
            longest_answer=group.longest if last and group.size else 0,
            is_search_step=self.request.is_search_step,
            params=self.request.params,
            error="" if self._error is None else type(self._error).__name__,
            least_cached=group.least_cached or 0 if last else 0,
            prefill_chunks=self.prefill_chunks,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            loaded_tokens=self.loaded_tokens,
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PooledStream(OutputStream):
    """The single result of a pooling request."""

    def __init__(self, request: PoolRequest) -> None:
        self.request: PoolRequest = request
        self.ended: Callable[[], None] | None = None
        self.times = request.new_times()
        self.finish_reason: FinishReason | None = None
        self.finished_by_core = False
        self._cached_tokens = self._loaded_tokens = 0
        self._error = ""
        self._result: asyncio.Future[Pooled] = asyncio.get_running_loop().create_future()

    async def result(self) -> Pooled:
        """Wait for the result.

        Raises:
            RequestRefused: the core does not accept the request.
            RequestFailed: the engine failed while it ran the request.
            EngineDead: the engine has stopped.
        """
        return await self._result

    @override
    def put(self, output: RequestOutput) -> None:
        self.finished_by_core = not isinstance(output, TokensOutput)
        if not isinstance(output, PooledOutput):
            self.fail(error_of(output, PooledOutput))
            return
        self.finish_reason = "stop"
        self._cached_tokens, self._loaded_tokens = output.cached_tokens, output.loaded_tokens
        if not self._result.done():
            self._result.set_result(Pooled(output.data, output.cached_tokens, self.times))

    @override
    def fail(self, error: EngineError) -> None:
        self.finish_reason = "error"
        self._error = type(error).__name__
        if not self._result.done():
            self._result.set_exception(error)
            self._result.exception()  # marks it as retrieved; the reader may be gone

    @override
    def record(self, request_id: str) -> RequestRecord:
        cached, loaded = self._cached_tokens, self._loaded_tokens
        return pooled_record(self, self.request, request_id, cached, loaded, self._error)


def pooled_record(
    stream: OutputStream, request: PoolRequest, request_id: str, cached_tokens: int, loaded_tokens: int, error: str
) -> RequestRecord:
    """The record of a pooling request; see `OutputStream.record`. `error`: see `RequestRecord`."""
    return RequestRecord(
        kind="pool",
        request_id=request_id,
        origin=request.origin,
        times=stream.times,
        finish_reason=stream.finish_reason or "abort",
        prompt_tokens=len(request.prompt),
        cached_tokens=cached_tokens,
        loaded_tokens=loaded_tokens,
        error=error,
    )


def error_of(output: RequestOutput, expected: type[RequestOutput]) -> EngineError:
    """The error in an output, or an internal error if another kind of output was expected."""
    if not isinstance(output, ErrorOutput):
        return RequestFailed(f"internal error: {type(output).__name__} instead of {expected.__name__}")
    if output.is_remote:
        return BlocksNotRead(output.error)
    return RequestRefused(output.error) if output.invalid else RequestFailed(output.error)


def core_request(request_id: str, request: GenerateRequest | PoolRequest) -> AddRequest:
    """The message by which a request is sent to the core."""
    fields = {name: getattr(request, name) for name in RequestFields.__struct_fields__}
    trace = request.origin.trace
    sampled = trace if trace is not None and trace.sampled else None
    return AddRequest(request_id, request.prompt, request.params, sampled, **fields)
