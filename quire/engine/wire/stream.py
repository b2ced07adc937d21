"""The output of one sequence on its way from the engine to whoever asked for it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from quire.engine.wire.detokenizer import Detokenizer, TextParams
from quire.engine.wire.errors import EngineError, RequestFailed
from quire.engine.wire.protocol import FinishReason, SamplingParams, SequenceOutput, TokenArray, TokenLogprobs
from quire.engine.wire.records import RequestRecord, RequestTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate.

    Attributes:
        prompt: token ids, 1-D int32.
        priority: lower goes first, under the priority policy.
        cache_salt: prefix blocks are shared only between requests with equal salts.
        timeout: seconds until it is ended, if it has not come to its own end.
    """

    prompt: TokenArray
    params: SamplingParams
    text: TextParams = field(default_factory=TextParams)
    priority: int = 0
    cache_salt: str | None = None
    timeout: float | None = None


@dataclass(slots=True)
class Delta:
    """What is new in a sequence since the last delta. Steps that nobody fetched in time are merged into one.

    Attributes:
        times: of the whole sequence, in its last delta.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    times: RequestTimes | None = None


class SequenceStream:
    """Collects the outputs of one sequence; one reader takes them with `next`."""

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self.request = request
        self.times = RequestTimes(arrived=time.monotonic())
        self.output_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._detokenizer = detokenizer
        self._pending: Delta | None = None
        self._error: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Delta:
        """What came since the last call, waiting for it if need be.

        Raises:
            RequestFailed: the engine gave this sequence up.
            EngineDead: the engine ended.
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
        return delta

    def put(self, output: SequenceOutput) -> None:
        """Take in what a step brought."""
        if output.error is not None:
            self.fail(RequestFailed(output.error))
            return
        before = self._detokenizer.tokens_used
        reason = output.finish_reason
        text = self._detokenizer.push(output.token_ids, last=reason is not None, stopped=reason == "stop")
        used = self._detokenizer.tokens_used - before
        self.output_tokens += used
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        delta = self._pending or Delta(cached_tokens=self.cached_tokens)
        delta.text += text
        delta.token_ids += output.token_ids[:used]
        if output.logprobs is not None:
            delta.logprobs += output.logprobs[:used]
        delta.prompt_logprobs = output.prompt_logprobs or delta.prompt_logprobs
        if self._detokenizer.matched is not None:
            delta.finish_reason, delta.stop_reason = "stop", self._detokenizer.matched
        elif reason is not None:
            delta.finish_reason, delta.stop_reason = reason, output.stop_reason
        self.finish_reason = delta.finish_reason
        delta.times = None if self.finish_reason is None else self.times
        self._pending = delta
        self._wake()

    def fail(self, error: EngineError) -> None:
        """Let the reader meet `error` after what is pending."""
        self.finish_reason = "error"
        self._error = error
        self._wake()

    def record(self) -> RequestRecord:
        """The books' entry, once the sequence has ended; without an end of its own it was aborted."""
        return RequestRecord(
            times=self.times,
            finished=time.monotonic(),
            finish_reason=self.finish_reason or "abort",
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            max_tokens=self.request.params.max_tokens,
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
