"""Running the sequences of one HTTP request side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quire.api.http.errors import InvalidRequest
from quire.api.protocol.common import CompletionTokensDetails, PromptTokensDetails, RequestMetrics, Usage
from quire.engine.wire.client import EngineClient
from quire.engine.wire.records import RequestTimes
from quire.engine.wire.stream import Delta, GenerateRequest

Indexed = tuple[int, Delta]


def admit(client: EngineClient, sequences: int, param: str) -> Callable[[], None]:
    """Take places for a request before anything of it runs; gives what frees them at its end.

    Args:
        client: of the model's engine.
        sequences: how many places.
        param: the field that makes them so many.

    Raises:
        EngineOverloaded: come again later.
        InvalidRequest: it would never find room.
        EngineDead: the engine has ended.
    """
    if sequences > client.capacity:
        raise InvalidRequest(
            f"The request asks for {sequences} sequences; the server takes {client.capacity} at once.", param
        )
    return client.admit(sequences)


async def run(client: EngineClient, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Indexed, None]:
    """Deltas of all sequences as they come, each with its index. Closing it early frees all of them.

    Raises:
        EngineError: one of them failed; the others are freed.
    """
    if len(requests) == 1:
        async with aclosing(client.generate(requests[0])) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    async with aclosing(_merged(client, requests)) as merged:
        async for item in merged:
            yield item


async def _merged(client: EngineClient, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Indexed, None]:
    arrived: asyncio.Queue[Indexed | BaseException | None] = asyncio.Queue()

    async def pump(index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(client.generate(request)) as deltas:
                async for delta in deltas:
                    arrived.put_nowait((index, delta))
        except Exception as error:  # noqa: BLE001 raised again by the reader below
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    tasks = [asyncio.create_task(pump(index, request)) for index, request in enumerate(requests)]
    try:
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
class Collected:
    """Everything that came of one sequence."""

    text: str = ""
    whole: Delta = field(default_factory=Delta)

    def add(self, delta: Delta) -> None:
        """Take in a delta."""
        whole = self.whole
        self.text += delta.text
        whole.token_ids += delta.token_ids
        whole.logprobs += delta.logprobs
        whole.prompt_logprobs = delta.prompt_logprobs or whole.prompt_logprobs
        whole.cached_tokens = whole.cached_tokens or delta.cached_tokens
        whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
        whole.times = delta.times


async def collect(client: EngineClient, requests: Sequence[GenerateRequest]) -> list[Collected]:
    """Run all sequences to their ends.

    Raises:
        EngineError: one of them failed.
    """
    done = [Collected() for _ in requests]
    async with aclosing(run(client, requests)) as deltas:
        async for index, delta in deltas:
            done[index].add(delta)
    return done


class Tally:
    """Counts the tokens of a request whose prompts have `n` answers each."""

    def __init__(self, prompt_lengths: Sequence[int], n: int) -> None:
        self._prompt = sum(prompt_lengths)
        self._n = n
        self._cached: dict[int, int] = {}
        self._times: list[RequestTimes] = []
        self.completion = 0
        self.reasoning = 0

    def add(self, index: int, delta: Delta) -> None:
        """Count a delta of the index-th sequence."""
        self.completion += len(delta.token_ids)
        if delta.cached_tokens and index % self._n == 0:  # a prompt is counted once, however many answers it has
            self._cached[index] = delta.cached_tokens
        if delta.times is not None:
            self._times.append(delta.times)

    def metrics(self) -> RequestMetrics:
        """How long the sequences, which have all ended, waited and took."""
        times = self._times
        arrived, scheduled = (min(getattr(one, name) for one in times) for name in ("arrived", "scheduled"))
        first, last = min(one.first_token for one in times), max(one.last_token for one in times)
        gaps = self.completion - len(times)
        return RequestMetrics(
            queue_time_ms=(scheduled - arrived) * 1e3,
            time_to_first_token_ms=(first - arrived) * 1e3,
            generation_time_ms=(last - first) * 1e3,
            mean_itl_ms=sum(one.last_token - one.first_token for one in times) / gaps * 1e3 if gaps > 0 else None,
            tokens_per_second=self.completion / max(last - scheduled, 1e-9),
        )

    def last_words(self, *, usage: bool, metrics: bool) -> dict[str, Any]:
        """Of a stream: what of the two is wanted."""
        words: dict[str, Any] = {"usage": self.usage().model_dump() if usage else None}
        return {**words, "metrics": self.metrics().model_dump()} if metrics else words

    def usage(self) -> Usage:
        """The counts so far."""
        return Usage(
            prompt_tokens=self._prompt,
            completion_tokens=self.completion,
            total_tokens=self._prompt + self.completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=self.reasoning),
        )
