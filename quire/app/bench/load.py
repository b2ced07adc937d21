"""Sends streaming requests to an OpenAI-compatible server and records when chunks arrive."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from quire.app.openai_client import ServerError, choices, delta_of, read_chunk, text_in
from quire.config.commands import BenchPooling, BenchServe

_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea body information
back parent face others level office door health person art war history party result change morning reason
research girl guy moment air teacher force education foot boy age policy music light voice paper market sense
river garden window table summer winter letter train stone bread north south green yellow silver simple quick
early late young small large open close clear strong quiet happy ready common human local final
""".split()  # noqa: SIM905 a page of words reads better than a list


class PromptMaker:
    """Make prompts of random words, one token each in most tokenizers, that have only a prefix in common."""

    def __init__(self, seed: int, prefix_len: int, input_len: int) -> None:
        self._random = random.Random(seed)
        self._prefix = self._words(prefix_len)
        self._input_len = input_len

    def next(self) -> str:
        """The next prompt: the prefix, then random words."""
        return " ".join([*self._prefix, *self._words(self._input_len)])

    def text(self, words: int) -> str:
        """A text of random words, without the prefix. `words`: number of words."""
        return " ".join(self._words(words))

    def _words(self, count: int) -> list[str]:
        return self._random.choices(_WORDS, k=count)


@dataclass(slots=True)
class Sample:
    """A request; times are in seconds since it was sent.

    Attributes:
        arrivals: times of the chunks with text.
        aborted: the client closed the stream before its end, because of --abort-fraction.
    """

    arrivals: list[float] = field(default_factory=list)
    e2e: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    aborted: bool = False
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0]

    @property
    def gaps(self) -> list[float]:
        """Times between chunks."""
        return [later - sooner for sooner, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean time per output token, without the first one; None for a single token."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All requests of a run, and its duration."""

    samples: list[Sample]
    seconds: float


Send = Callable[[aiohttp.ClientSession], Awaitable[Sample]]


async def generate_load(settings: BenchServe, model: str, on_sample: Callable[[Sample], None]) -> LoadResult:
    """Send the requests. `on_sample` is called with each request when it ends."""
    prompts = PromptMaker(settings.workload_seed, settings.prefix_len, settings.input_len)
    rng = random.Random(settings.workload_seed + 1)

    def prepare() -> Send:
        body = request_body(settings, model, prompts.next())
        aborts = rng.random() < settings.abort_fraction
        # Not always the middle one: a server may send several tokens in a chunk, and then fewer chunks.
        most_chunks = rng.randint(1, max(1, settings.output_len // 2)) if aborts else None
        return lambda session: stream_answer(session, settings, body, most_chunks)

    return await send_all(settings, rng, prepare, on_sample)


async def send_all(
    settings: BenchServe | BenchPooling,
    rng: random.Random,
    prepare: Callable[[], Send],
    on_sample: Callable[[Sample], None],
) -> LoadResult:
    """Send requests when they are due.

    Args:
        settings: number of requests, concurrency and duration.
        rng: random numbers for arrival times.
        prepare: makes the next request.
        on_sample: is called with each request when it ends.
    """
    samples: list[Sample] = []
    slots = asyncio.Semaphore(settings.concurrency)
    timeout = aiohttp.ClientTimeout(total=settings.timeout)
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers, read_bufsize=1 << 20
    ) as session:
        started = time.perf_counter()

        async def send_one(send: Send) -> None:
            try:
                sample = await send(session)
            finally:
                slots.release()
            samples.append(sample)
            on_sample(sample)

        async with asyncio.TaskGroup() as tasks:
            async for _ in _starts(settings, rng, started):
                await slots.acquire()
                if settings.duration is not None and time.perf_counter() - started >= settings.duration:
                    slots.release()
                    break
                tasks.create_task(send_one(prepare()))
        return LoadResult(samples, time.perf_counter() - started)


async def _starts(settings: BenchServe | BenchPooling, rng: random.Random, started: float) -> AsyncIterator[None]:
    """Yield when the next request is due."""
    due, sent = 0.0, 0
    while settings.duration is not None or sent < settings.num_requests:
        if settings.request_rate is not None:
            due += rng.expovariate(settings.request_rate)
            if settings.duration is not None and due > settings.duration:
                return
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
        sent += 1
        yield


def request_body(settings: BenchServe, model: str, prompt: str | list[dict[str, Any]]) -> dict[str, Any]:
    """Return the body of a request. `prompt`: a text, or parts of a message for the chat API."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": settings.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if settings.endpoint == "chat":
        return {**body, "messages": [{"role": "user", "content": prompt}]}
    return {**body, "prompt": prompt}


async def stream_answer(
    session: aiohttp.ClientSession, settings: BenchServe, body: dict[str, Any], most_chunks: int | None = None
) -> Sample:
    """Send a request and read its stream. `most_chunks`: close it after so many chunks of text; None: never."""
    path = "chat/completions" if settings.endpoint == "chat" else "completions"
    sample = Sample()
    started = time.perf_counter()
    try:
        async with session.post(f"{settings.url.rstrip('/')}/{path}", json=body) as answer:
            if answer.status != 200:
                sample.error = f"{answer.status}: {(await answer.text())[:200]}"
                return sample
            async for line in answer.content:
                _read(sample, line.decode(errors="replace"), time.perf_counter() - started)
                if len(sample.arrivals) == most_chunks:
                    sample.aborted = True
                    answer.close()
                    break
    except ServerError as error:
        sample.error = str(error)
    except (aiohttp.ClientError, OSError, ValueError) as error:  # a timeout is an OSError
        sample.error = repr(error)[:200]
    sample.e2e = time.perf_counter() - started
    if sample.error is None and not sample.arrivals:
        sample.error = "the response contained no text"
    sample.output_tokens = sample.output_tokens or len(sample.arrivals)
    return sample


def _read(sample: Sample, line: str, now: float) -> None:
    chunk = read_chunk(line)
    if isinstance(usage := chunk.get("usage"), dict):
        details = usage.get("prompt_tokens_details")
        sample.prompt_tokens, sample.output_tokens = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        sample.cached_tokens = _count(details, "cached_tokens") if isinstance(details, dict) else 0
    if any(map(_has_text, choices(chunk))):
        sample.arrivals.append(now)


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) else 0


def _has_text(choice: dict[str, Any]) -> bool:
    return bool(text_in(choice, "text") or text_in(delta_of(choice), "content", "reasoning", "reasoning_content"))
