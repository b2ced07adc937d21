"""One life of a server under ordinary streams, which hostile bodies disturb."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from benchmarks.hostile.body import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    MESSAGES,
    RENDER_CHAT,
    RESPONSES,
    TOKENIZE,
    Hostile,
    Json,
    chat,
    completion,
    encode,
    function,
    message,
    response,
)
from benchmarks.hostile.crowds import Crowd
from benchmarks.hostile.pooling import EMBEDDINGS, RERANK
from benchmarks.hostile.send import Answer, send
from benchmarks.hostile.server import Server
from benchmarks.hostile.watch import Span, Watcher, probe_health, stream_answers

Disturbance = Hostile | Crowd
MEMORY_MARGIN = 200_000_000  # bytes that may be added in all
_RECOVERY_SECONDS = 60.0
_SETTLE_SECONDS = 30.0
_PAUSE = 0.5  # seconds after a body until the next one
_CACHE_TOKENS, _PROMPT_TOKENS = 250_000, 1900  # more than the cache holds; the length of prompts that fill it
# A cache of known size, as memory is compared; all requests come from one address.
_FLAGS = ("--kv-cache-memory-bytes", "1GiB", "--no-access-log", "--max-client-share", "1")


@dataclass(frozen=True, slots=True)
class Options:
    """What a session needs to know.

    Attributes:
        seconds: for which a body is sent again and again; it is sent at least once.
        timeout: of an answer, in seconds.
    """

    streams: int
    seconds: float
    quiet_seconds: float
    timeout: float
    max_memory: int
    port: int
    flags: tuple[str, ...]


@dataclass(slots=True)
class Row:
    """What one body, or several at a time, did to the others. Times are in milliseconds, memory is in megabytes.

    Attributes:
        gaps: the times between chunks of the streams, of which `itl` has percentiles.
    """

    names: list[str]
    control: bool
    answers: list[list[Json]]
    itl: dict[str, float]
    health_max: float
    memory: dict[str, float]
    recovery_seconds: float | None
    gaps: list[float]
    ended: str | None = None

    @property
    def problems(self) -> list[str]:
        """What is wrong with its answers."""
        problems = {str(answer["problem"]) for answers in self.answers for answer in answers if answer["problem"]}
        return sorted(problems | ({f"the server ended: {self.ended}"} if self.ended else set()))


@dataclass
class Session:
    """A server with streams and health probes; usable until the server ends."""

    options: Options
    folder: Path
    server: Server = field(init=False)
    quiet: dict[str, float] = field(init=False)
    memory_before: int = field(init=False)
    counts_before: dict[str, int] = field(init=False)

    def __enter__(self) -> Self:
        options = self.options
        with ExitStack() as stack:
            self.server = stack.enter_context(
                Server(self.folder, options.port, options.max_memory, (*_FLAGS, *options.flags))
            )
            _warm_up(self.server)
            address = (self.server.host, self.server.port)
            self._health = stack.enter_context(Watcher(probe_health, *address))
            self._streams = stack.enter_context(Watcher(stream_answers, *address, options.streams))
            time.sleep(3)
            self.memory_before = self.server.memory()
            self.counts_before = self.server.counts()
            self.quiet = self.measure_quiet()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure_quiet(self) -> dict[str, float]:
        """ITL without hostile requests, and the slowest answer of /health."""
        start = time.monotonic()
        time.sleep(self.options.quiet_seconds)
        window = (start, time.monotonic())
        return {**itl_of(self._streams.spans(*window), window), "health_max": longest(self._health.spans(*window))}

    def disturb(self, bodies: Sequence[Disturbance]) -> Row:
        """Send bodies, each by a client of its own, and see what that does."""
        answers: list[list[Answer]] = [[] for _ in bodies]
        senders = [
            threading.Thread(target=self._send_for_a_while, args=(self._sender(hostile), into))
            for hostile, into in zip(bodies, answers, strict=True)
        ]
        memory = self.server.memory()
        start = time.monotonic()
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        recovery = self._recover()
        window = (start, time.monotonic())
        time.sleep(_PAUSE)
        spans = self._streams.spans(*window)
        return Row(
            names=[hostile.name for hostile in bodies],
            control=all(hostile.control for hostile in bodies),
            answers=[[answer.to_json() for answer in answers_of_client] for answers_of_client in answers],
            itl=itl_of(spans, window),
            health_max=longest(self._health.spans(*window)),
            memory={
                "before": memory / 1e6,
                "max": self.server.peak(*window) / 1e6,
                "after": self.server.memory() / 1e6,
            },
            recovery_seconds=recovery,
            gaps=lengths(spans, window),
            ended=self.server.ended,
        )

    def finish(self) -> Json:
        """End the streams, let the server settle, and return what it still holds."""
        self._streams.close()
        end = time.monotonic() + _SETTLE_SECONDS
        limit = self.memory_before + MEMORY_MARGIN
        while (self.server.load() or self.server.memory() > limit) and time.monotonic() < end:
            time.sleep(0.5)
        memory = self.server.memory()
        return {
            "memory_mb": {
                "before": self.memory_before / 1e6,
                "max": max(size for _, size in self.server.samples) / 1e6,
                "after": memory / 1e6,
                "after_by_process": [size / 1e6 for size in self.server.memory_by_process()],
            },
            "counts": {"before": self.counts_before, "after": self.server.counts()},
            "held": self.server.held(),
            "tracebacks": self.server.log.count("Traceback (most recent call last)"),
        }

    def _sender(self, hostile: Disturbance) -> Callable[[], Answer]:
        """A function that sends once; the next body may depend on the last answer."""
        if isinstance(hostile, Crowd):
            return partial(hostile.send, (self.server.host, self.server.port), self.options.timeout)
        content = hostile.body()

        def send_body() -> Answer:
            nonlocal content
            answer = send(self.server.host, self.server.port, hostile, content, self.options.timeout)
            if hostile.follow is not None and answer.status:
                content = encode(hostile.follow(answer.start))
            return answer

        return send_body

    def _send_for_a_while(self, send_once: Callable[[], Answer], into: list[Answer]) -> None:
        end = time.monotonic() + self.options.seconds
        while True:
            into.append(send_once())
            if time.monotonic() >= end or not into[-1].status:
                return

    def _recover(self) -> float | None:
        """Seconds until only the streams are being answered, and half of them at least; None if that takes too long."""
        began = time.monotonic()
        while self.server.ended is None and time.monotonic() - began < _RECOVERY_SECONDS:
            load = self.server.load()
            if load is not None and load <= self.options.streams <= 2 * self._streams.active():
                return time.monotonic() - began
            time.sleep(0.02)
        return None


def itl_of(spans: Sequence[Span], window: Span) -> dict[str, float]:
    """Percentiles of the time between chunks in milliseconds, and chunks per second."""
    times = lengths(spans, window)
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {
        "p50": cuts[49],
        "p99": cuts[98],
        "max": max(times),
        "per_second": len(spans) / (window[1] - window[0]),
    }


def lengths(spans: Sequence[Span], window: Span) -> list[float]:
    """Times between chunks in milliseconds; the window's length if nothing came."""
    times = [1e3 * (end - start) for start, end in spans]
    return times if len(times) > 1 else [1e3 * (window[1] - window[0])] * 2


def longest(spans: Sequence[Span]) -> float:
    """Length of the longest span in milliseconds."""
    return max((1e3 * (end - start) for start, end in spans), default=0.0)


def _warm_up(server: Server) -> None:
    """Ordinary requests of each kind, so that nothing is loaded or started for the first time later."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    formatted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    requests: list[tuple[str, Json]] = [
        (COMPLETIONS, completion(n=64, logprobs=5, max_tokens=64, ignore_eos=True)),
        (COMPLETIONS, completion("word " * 1500, prompt_logprobs=2, echo=True, max_tokens=64)),
        (CHAT, chat(response_format=formatted)),
        (CHAT, chat(structured_outputs={"regex": "[a-z]{1,20}"}, presence_penalty=1, bad_words=["bad"])),
        (CHAT, chat(tools=[function("f", schema)], tool_choice="required")),
        (RESPONSES, response(store=True)),
        (MESSAGES, message()),
        (COUNT_TOKENS, {"messages": message()["messages"]}),
        (RENDER_CHAT, chat()),
        (TOKENIZE, {"prompt": "word " * 100_000}),
        (EMBEDDINGS, {"input": [f"text {number} " + "word " * 200 for number in range(64)]}),
        (EMBEDDINGS, {"input": "word " * 60_000, "truncate_prompt_tokens": -1}),
        (RERANK, {"query": "text", "documents": ["a", "b"]}),
    ]
    # Pages of the KV cache take memory when they are first written, which would look like memory that is not returned.
    numbers = random.Random(0)
    for _ in range(_CACHE_TOKENS // (16 * _PROMPT_TOKENS)):
        prompts = [[numbers.randrange(1000, 3000) for _ in range(_PROMPT_TOKENS)] for _ in range(16)]
        requests.append((COMPLETIONS, completion(prompts, max_tokens=1)))
    for path, body in requests:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=120)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text: Any = answer.read()
        connection.close()
        if answer.status != http.client.OK:
            raise RuntimeError(f"an ordinary request to {path} was refused: {text[:500]!r}")
