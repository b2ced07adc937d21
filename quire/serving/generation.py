"""Runs the sequences of one HTTP request concurrently, and counts their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.engine.client.engine import Engine
from quire.engine.client.origin import current_origin
from quire.engine.client.stream import Delta, GenerateRequest
from quire.engine.client.timeline import RequestTimes
from quire.protocol.common import CompletionTokensDetails, PromptTokensDetails, RequestMetrics, Usage
from quire.workers.tenant import take_turn

MediaName = Literal["audio", "image", "video"]
IndexedDelta = tuple[int, Delta]  # with the index of its sequence
_STARTED_AT_ONCE = 32  # sequences


async def generate_all(
    client: Engine, requests: Sequence[GenerateRequest], ended: Callable[[], None] | None = None
) -> AsyncGenerator[IndexedDelta, None]:
    """Deltas of all sequences as they arrive, each with its index. Closing the generator early aborts all sequences.

    `ended` is called when the engine has finished all of them, although the last deltas may not have been read yet.
    What is not read stays in the streams, which merge deltas.

    Raises:
        EngineError: a sequence failed; the others are aborted.
    """
    if len(requests) == 1:
        async with aclosing(client.generate(requests[0], ended)) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    async with aclosing(_merged(client, requests, ended)) as merged:
        async for item in merged:
            yield item


async def _merged(
    client: Engine, requests: Sequence[GenerateRequest], ended: Callable[[], None] | None
) -> AsyncGenerator[IndexedDelta, None]:
    arrived: asyncio.Queue[IndexedDelta | BaseException | None] = asyncio.Queue(len(requests))
    unfinished = len(requests)

    def count() -> None:
        nonlocal unfinished
        unfinished -= 1
        if not unfinished and ended is not None:
            ended()

    async def pump(index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(client.generate(request, count)) as deltas:
                async for delta in deltas:
                    await arrived.put((index, delta))
        except Exception as error:  # noqa: BLE001 raised again below
            await arrived.put(error)
        else:
            await arrived.put(None)

    tasks: list[asyncio.Task[None]] = []
    try:
        for index, request in enumerate(requests):
            if index % _STARTED_AT_ONCE == 0:
                await take_turn()  # the event loop would start all of them before it turns to others
            tasks.append(asyncio.create_task(pump(index, request)))
        running = len(tasks)
        while running:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class SequenceResult:
    """The whole output of one sequence.

    Attributes:
        total: all deltas as one; its text is in `text`.
    """

    total: Delta = field(default_factory=Delta)
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self._texts)

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        total = self.total
        self._texts.append(delta.text)
        total.token_ids += delta.token_ids
        total.logprobs += delta.logprobs
        total.prompt_logprobs = delta.prompt_logprobs or total.prompt_logprobs
        total.cached_tokens = total.cached_tokens or delta.cached_tokens
        total.finish_reason, total.stop_reason = delta.finish_reason, delta.stop_reason
        total.times, total.held_blocks = delta.times, delta.held_blocks

    def drop_output(self) -> None:
        """Forget the text and its tokens."""
        self._texts.clear()
        self.total.token_ids, self.total.logprobs = [], []


async def collect(
    client: Engine,
    requests: Sequence[GenerateRequest],
    observe: Callable[[int, Delta], None] = lambda index, delta: None,
) -> list[SequenceResult]:
    """Run all sequences until they end. `observe` is called with each delta and the index of its sequence.

    Raises:
        EngineError: a sequence failed; the others are aborted.
    """
    results = [SequenceResult() for _ in requests]
    async with aclosing(generate_all(client, requests)) as deltas:
        async for index, delta in deltas:
            results[index].add(delta)
            observe(index, delta)
    return results


def request_metrics(times: Sequence[RequestTimes], tokens: int) -> RequestMetrics:
    """Timings of a request. `times`: of its sequences, which have ended; `tokens`: that were generated for them."""
    arrived, queued, scheduled = (
        min(getattr(timing, name) for timing in times) for name in ("arrived", "queued", "scheduled")
    )
    first = min((timing.first_token for timing in times if timing.first_token), default=scheduled)
    last = max(first, *(timing.last_token for timing in times))
    gaps = tokens - len(times)
    generating = sum(timing.last_token - timing.first_token for timing in times)
    return RequestMetrics(
        preprocess_time_ms=(queued - arrived) * 1e3,
        queue_time_ms=max(0.0, scheduled - queued) * 1e3,
        prefill_time_ms=(first - scheduled) * 1e3,
        generation_time_ms=(last - first) * 1e3,
        time_to_first_token_ms=(first - arrived) * 1e3,
        mean_itl_ms=generating / gaps * 1e3 if gaps > 0 else None,
        tokens_per_second=tokens / max(last - scheduled, 1e-9),
    )


class UsageCounter:
    """Count the tokens of a request. Each of its prompts has `n` sequences.

    Attributes:
        times: of its sequences that have ended.
    """

    def __init__(
        self, prompt_lengths: Sequence[int], n: int, media_tokens: Mapping[MediaName, int] | None = None
    ) -> None:
        """`media_tokens`: numbers of prompt tokens that stand for media."""
        self._prompt = sum(prompt_lengths)
        self._media = {name: count for name, count in (media_tokens or {}).items() if count}
        self._n = n
        self._cached: dict[int, int] = {}
        self.times: list[RequestTimes] = []
        self.completion = 0
        self.reasoning = 0

    def add(self, index: int, delta: Delta) -> None:
        """Count a delta of the sequence with this index."""
        self.completion += len(delta.token_ids)
        if delta.cached_tokens and index % self._n == 0:  # once for each prompt
            self._cached[index] = delta.cached_tokens
        if delta.times is not None:
            self.times.append(delta.times)

    def metrics(self) -> RequestMetrics:
        """Timings of the request, once all of its sequences have ended."""
        return request_metrics(self.times, self.completion)

    def final_fields(self, *, usage: bool, metrics: bool) -> dict[str, Any]:
        """Fields of the last chunk of a stream: `usage` and `metrics`, if the request asks for them."""
        fields: dict[str, Any] = {"usage": self.usage().model_dump() if usage else None}
        return {**fields, "metrics": self.metrics().model_dump()} if metrics else fields

    def usage(self) -> Usage:
        """Token counts so far."""
        current_origin().notes.reasoning_tokens = self.reasoning
        return self._usage(self.completion, self.reasoning)

    def usage_before(self, tokens: int, reasoning: int) -> Usage:
        """Token counts without the last `tokens` completion tokens, `reasoning` of which are reasoning."""
        return self._usage(self.completion - tokens, self.reasoning - reasoning)

    def _usage(self, completion: int, reasoning: int) -> Usage:
        return Usage(
            prompt_tokens=self._prompt,
            completion_tokens=completion,
            total_tokens=self._prompt + completion,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(self._cached.values()),
                audio_tokens=self._media.get("audio"),
                multimodal_tokens=self._media or None,
            ),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning),
        )
