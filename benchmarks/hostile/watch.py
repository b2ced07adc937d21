"""Ordinary streams and health probes: each in a process of its own, so that the sender's work does not delay them.

Times are those of `time.monotonic`, which all processes share.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Self

Span = tuple[float, float]  # start and end of something
PROBE_SECONDS = 0.05
_PROBE_TIMEOUT = 60.0
_MAX_TOKENS = 1800  # of a stream; the bundled model's context is 2,048
_RETRY_SECONDS = 0.1
_ACTIVE_SECONDS = 0.25


class Watcher:
    """Run one of the functions below in another process, and ask it for what it has seen."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=target, args=(child_end, *arguments), daemon=True)
        self._process.start()
        child_end.close()
        self._pipe.recv()  # it has begun

    def spans(self, start: float, end: float) -> list[Span]:
        """What overlaps with this window, with that which has not ended yet."""
        self._pipe.send((start, end))
        spans: list[Span] = self._pipe.recv()
        return spans

    def active(self) -> int:
        """The number of streams that have got a chunk in the last quarter of a second."""
        self._pipe.send(None)
        count: int = self._pipe.recv()
        return count

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Log:
    """Spans that have ended, and the beginnings of those that have not."""

    spans: list[Span] = field(default_factory=list)
    open_since: dict[int, float] = field(default_factory=dict)

    def answer(self, question: Span | None) -> list[Span] | int:
        """What `Watcher.spans` and `Watcher.active` return."""
        if question is None:
            now = time.monotonic()
            return sum(now - since < _ACTIVE_SECONDS for since in self.open_since.values())
        return self._between(question)

    def _between(self, window: Span) -> list[Span]:
        """What overlaps with a window; what ended before it is forgotten, as the next window is a later one."""
        start, end = window
        now = time.monotonic()
        self.spans = [span for span in self.spans if span[1] >= start]
        running = [(since, now) for since in self.open_since.values() if now - since > PROBE_SECONDS]
        return [span for span in (*self.spans, *running) if span[0] <= end]


def probe_health(pipe: Connection, host: str, port: int) -> None:
    """Ask for /health on a new connection every 50 ms. A span is a probe; one without an answer is 60 s long."""
    log = _Log()
    pipe.send(None)
    due = time.monotonic()
    while True:
        while pipe.poll(max(0.0, due - time.monotonic())):
            pipe.send(log.answer(pipe.recv()))
        sent = time.monotonic()
        healthy = _is_healthy(host, port)
        log.spans.append((sent, time.monotonic() if healthy else sent + _PROBE_TIMEOUT))
        due = max(due + PROBE_SECONDS, time.monotonic() - PROBE_SECONDS)


def _is_healthy(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), _PROBE_TIMEOUT) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return connection.recv(1024).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def stream_answers(pipe: Connection, host: str, port: int, count: int) -> None:
    """Keep `count` streams running. A span is the time between two chunks of one of them."""
    asyncio.run(_Streams(host, port, count).run(pipe))


class _Streams:
    def __init__(self, host: str, port: int, count: int) -> None:
        self._address = (host, port)
        self._count = count
        self._log = _Log()

    async def run(self, pipe: Connection) -> None:
        def answer() -> None:
            pipe.send(self._log.answer(pipe.recv()))

        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._count):
                tasks.create_task(self._stream_again_and_again(index))
            pipe.send(None)

    async def _stream_again_and_again(self, index: int) -> None:
        max_tokens = _MAX_TOKENS * (index + 1) // self._count  # at first, so that not all of them end together
        while True:
            try:
                await self._stream(index, max_tokens)
                max_tokens = _MAX_TOKENS
            except OSError:
                await asyncio.sleep(_RETRY_SECONDS)
            finally:
                self._log.open_since.pop(index, None)

    async def _stream(self, index: int, max_tokens: int) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(_request(index, max_tokens))
            status = await reader.readline()
            if b" 200 " not in status:
                raise ConnectionError(status.decode(errors="replace"))
            last = None
            while data := await reader.read(1 << 16):
                if b"data: " in data:
                    now = time.monotonic()
                    if last is not None:
                        self._log.spans.append((last, now))
                    self._log.open_since[index] = last = now
        finally:
            writer.close()


def _request(index: int, max_tokens: int) -> bytes:
    body = {
        "prompt": f"Tell me a story about {index} birds and a tree.",
        "stream": True,
        "max_tokens": max_tokens,
        "temperature": 0.7,
        "ignore_eos": True,
        "skip_special_tokens": False,  # so that every token has a text, and therefore a chunk
    }
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content
