"""Responsiveness of a server that holds thousands of connections whose clients do nothing.

    python -m benchmarks.connections --out benchmarks/results/FILE.json

Opens streams that are not read, connections that are idle, requests of which only a part is sent, handshakes that are
refused, large bodies that do not go on, readers of one long response, and requests whose deadlines pass together,
against a server with default settings and a fake engine core in another process. Meanwhile a client asks for /health
on new connections, and others send ordinary requests. It ends when the server has closed all the others, and reports
when nothing of them was held any more, what each kind was answered, and the slowest probes with their times.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

from benchmarks.hostile.watch import Span, Watcher, probe_health
from quire.allocator import keep_freed_memory, use_one_arena
from quire.engine.client.launch import ProcessCore
from quire.engine.client.protocol import (
    Abort,
    AddRequest,
    FinishReason,
    Ping,
    Pong,
    Ready,
    RequestOutput,
    Shutdown,
    StepOutput,
    StepStats,
    TokensOutput,
)
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.transport import CoreChannel
from tests.support.fake_core import INFO
from tests.support.server import running_server
from tests.support.tokenizer import byte_tokenizer

UNREAD = {"prompt": "x", "max_tokens": 480, "stream": True}  # more than fits into buffers
BATCH, TOKENS_PER_STEP, STEP_SECONDS = 20, 4, 0.02  # 4,000 tokens a second
PAUSE = 0.2  # seconds between the ordinary requests of a client
LETTER = byte_tokenizer().encode("a").ids[0]
ORDINARY = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\nContent-Length: 5\r\n\r\n"
)
LARGE_BODY = 31 << 20  # of which two thirds are sent
SETTLE_SECONDS, MEMORY_MARGIN = 30, 150  # until memory has been returned, up to so many MiB
DEADLINE = 20.0  # seconds after the first of these requests
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def fake_core(address: str) -> None:
    """Generate several tokens in each step for some of the requests, in turn."""
    left: dict[str, int] = {}
    with CoreChannel(address) as channel:
        channel.send(Ready(INFO))
        while True:
            due = time.monotonic() + STEP_SECONDS
            aborted = False
            while (message := channel.receive(max(0.0, due - time.monotonic()))) is not None:
                match message:
                    case AddRequest(request_id=request_id, params=SamplingParams() as params):
                        left[request_id] = params.max_tokens
                    case Abort(request_ids=ids):
                        aborted = True
                        for request_id in ids:
                            left.pop(request_id, None)
                    case Ping(serial=serial):
                        channel.send(Pong(serial))
                    case Shutdown():
                        return
            outputs: list[RequestOutput] = []
            for request_id in list(left)[:BATCH]:
                tokens = left.pop(request_id)
                made = min(tokens, TOKENS_PER_STEP)
                reason: FinishReason | None = "length" if made == tokens else None
                outputs.append(TokensOutput(request_id, [LETTER] * made, reason, scheduled_at=due))
                if reason is None:
                    left[request_id] = tokens - made
            if outputs or aborted:  # as the engine: the last requests may be aborted, after which there is no step
                running = min(len(left), BATCH)
                channel.send(
                    StepOutput(outputs, StepStats(running, len(left) - running, len(outputs), 1, len(outputs)))
                )


async def serve(folder: Path, capacity: int) -> None:
    """Print the URL of a server on a free port, and serve until killed."""
    use_one_arena()
    keep_freed_memory()
    async with running_server(folder, fake_core, capacity=capacity, handle=ProcessCore()) as server:
        gc.freeze()  # as `quire serve` does
        print(server.url, flush=True)
        with server.state.malloc_trimmer.rationed_collections():
            await server.state.malloc_trimmer.trim_regularly(lambda: server.state.in_flight == 0)


def post(body: dict[str, Any]) -> bytes:
    """A complete request."""
    content = json.dumps(body)
    return f"{HEAD}Content-Length: {len(content)}\r\n\r\n{content}".encode()


@dataclass(eq=False, slots=True)
class Client:
    """A connection, and the beginning of what was read from it."""

    socket: socket.socket
    start: bytes = b""

    @property
    def is_open(self) -> bool:
        """Whether the server has not closed the connection; what it has sent is read only if it has."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return info[0] == 1  # established

    def status(self) -> str:
        """The status of the first response; "none" without one."""
        with suppress(OSError):  # there is nothing, or the connection was reset
            self.start = self.start or self.socket.recv(16)
        return self.start[9:12].decode() or "none"


Opener = Callable[[tuple[str, int], int], Awaitable[list[Client]]]


async def open_many(address: tuple[str, int], count: int, data: bytes | Callable[[], bytes]) -> list[Client]:
    """Clients that have sent `data`, or what it returns, and read nothing."""
    loop = asyncio.get_running_loop()

    async def open_client() -> Client:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.setblocking(False)
        await loop.sock_connect(made, address)
        with suppress(ConnectionError):  # it was refused meanwhile
            await loop.sock_sendall(made, data if isinstance(data, bytes) else data())
        return Client(made)

    made: list[Client] = []
    while len(made) < count:
        made += await asyncio.gather(*(open_client() for _ in range(min(100, count - len(made)))))
    return made


def opener(data: bytes) -> Opener:
    """Opens connections that have sent the same."""
    return partial(open_many, data=data)


async def open_with_deadlines(address: tuple[str, int], count: int) -> list[Client]:
    """Requests whose timeouts pass at the same time."""
    end = time.monotonic() + DEADLINE
    return await open_many(address, count, lambda: post({**UNREAD, "stream": False, "timeout": end - time.monotonic()}))


async def stored_response(url: str) -> str:
    """The path of a response of 480 tokens that has been generated."""
    async with client_of(url) as client:
        body = {"input": "x", "max_output_tokens": 480, "background": True, "stream": False}
        made = (await client.post("/v1/responses", json=body)).json()
        path = f"/v1/responses/{made['id']}"
        while made["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.1)
            made = (await client.get(path)).json()
    return path


async def open_readers(address: tuple[str, int], count: int, *, path: str) -> list[Client]:
    """Clients that have read a stored response to its end, all at the same time."""
    loop = asyncio.get_running_loop()
    head = f"GET {path}?stream=true HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    readers = await open_many(address, count, head.encode())

    async def read(reader: Client) -> None:
        reader.start = await loop.sock_recv(reader.socket, 1 << 16)
        while await loop.sock_recv(reader.socket, 1 << 16):
            pass

    await asyncio.gather(*map(read, readers))
    return readers


def kinds_of(options: argparse.Namespace, stored: str) -> dict[str, tuple[int, Opener]]:
    """Each kind of connection: how many there are, and what opens them. A new kind is a line here."""
    large = f"{HEAD}Content-Length: {LARGE_BODY}\r\n\r\n".encode() + b" " * (LARGE_BODY * 2 // 3)
    return {
        "unread": (options.unread, opener(post(UNREAD))),
        "fresh": (options.idle // 2, opener(b"")),
        "kept_alive": (options.idle - options.idle // 2, opener(HEALTH)),
        "half_heads": (options.half // 2, opener(HEAD.encode())),
        "half_bodies": (options.half - options.half // 2, opener(post(UNREAD)[:-10])),
        "refused_upgrades": (options.upgrades, opener(HANDSHAKE)),
        "slow_bodies": (options.slow, opener(large)),
        "deadlines": (options.deadlines, open_with_deadlines),
        "readers": (options.readers, partial(open_readers, path=stored)),
    }


class Ordinary:
    """Send ordinary requests one after the other, and keep the latencies in milliseconds."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._latencies: list[float] = []
        self._failures: list[str] = []

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began = time.monotonic()
            try:
                async with client_of(self._url) as client:
                    answer = await client.post("/v1/completions", json=ORDINARY)
                if answer.status_code != httpx.codes.OK:
                    self._failures.append(str(answer.status_code))
            except httpx.HTTPError as error:
                self._failures.append(repr(error))
            self._latencies.append((time.monotonic() - began) * 1e3)
            await asyncio.sleep(PAUSE)

    def report(self) -> dict[str, Any]:
        """What was measured since the last report."""
        latencies, self._latencies = self._latencies, []
        failures, self._failures = self._failures, []
        return {**percentiles(latencies), "failures": failures}


def client_of(url: str) -> httpx.AsyncClient:
    """A client on new connections. Without `verify` it reads no certificates, which takes longer than a request."""
    return httpx.AsyncClient(base_url=url, timeout=120, verify=False)  # noqa: S501


def percentiles(latencies: Sequence[float]) -> dict[str, float]:
    """Of latencies in milliseconds."""
    ordered = sorted(latencies)
    return {
        "requests": len(ordered),
        "p50_ms": statistics.median(ordered),
        "p99_ms": ordered[int(len(ordered) * 0.99)],
        "max_ms": ordered[-1],
    }


async def held(url: str) -> dict[str, int]:
    """What the server holds: requests that it answers, and sequences in the engine."""
    async with client_of(url) as client:
        load = (await client.get("/load")).json()["server_load"]
        page = (await client.get("/metrics")).text
    sequences = sum(
        float(line.split()[-1])
        for line in page.splitlines()
        if re.match(r"quire:num_requests_(running|waiting)\{", line)
    )
    return {"requests": load, "sequences": int(sequences)}


@dataclass(slots=True)
class Watch:
    """When which kind of client was opened, and when the server held nothing of it any more, in seconds."""

    url: str
    process: psutil.Process
    clients: int  # which send ordinary requests, and go on
    files: int  # before
    began: float = field(default_factory=time.monotonic)
    kinds: dict[str, list[Client]] = field(default_factory=dict)
    opened: dict[str, float] = field(default_factory=dict)
    closed: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0

    async def open(self, address: tuple[str, int], kinds: dict[str, tuple[int, Opener]]) -> None:
        """Open clients of one kind after the other."""
        for kind, (count, open_kind) in kinds.items():
            self.kinds[kind] = await open_kind(address, count)
            self.opened[kind] = time.monotonic() - self.began

    async def until_closed(self, kinds: int, seconds: float) -> None:
        """Look until all of so many kinds are closed and nothing is held."""
        while len(self.closed) <= kinds and time.monotonic() - self.began < seconds:
            await asyncio.sleep(0.5)
            self.memory = max(self.memory, resident(self.process))
            now = time.monotonic() - self.began
            for kind, made in list(self.kinds.items()):
                if kind not in self.closed and kind != "unread" and not any(client.is_open for client in made):
                    self.closed[kind] = now
            if len(self.opened) < kinds:
                continue
            if "all_connections" not in self.closed and self.process.num_fds() <= self.files + 2 * self.clients + 2:
                self.closed["all_connections"] = now
            if "places" not in self.closed and max((await held(self.url)).values()) <= 2 * self.clients:
                self.closed["places"] = now


def resident(process: psutil.Process) -> float:
    """Resident memory in MiB."""
    return float(process.memory_info().rss) / 2**20


async def measure(url: str, process: psutil.Process, options: argparse.Namespace) -> dict[str, Any]:
    """All phases against a running server."""
    parsed = httpx.URL(url)
    address = (parsed.host, parsed.port or 80)
    kinds = kinds_of(options, await stored_response(url))
    ordinary = [Ordinary(url) for _ in range(4)]
    with Watcher(probe_health, *address) as health:  # a process of its own: the clients' work does not delay it
        tasks = [asyncio.create_task(client.run()) for client in ordinary]
        began = time.monotonic()
        await asyncio.sleep(options.quiet_seconds)
        before = resident(process)
        report: dict[str, Any] = {"undisturbed": _latencies(await _probes(health, began), ordinary)}
        watch = Watch(url, process, len(ordinary), process.num_fds())
        opening = asyncio.create_task(watch.open(address, kinds))
        await watch.until_closed(len(kinds), options.max_seconds)
        await opening
        probes = await _probes(health, watch.began)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    slowest = sorted(probes, key=lambda probe: probe[0] - probe[1])[:10]
    report["opened_after_seconds"], report["free_after_seconds"] = watch.opened, watch.closed
    report["held"] = _latencies(probes, ordinary)
    report["slowest_probes"] = [
        {"at_second": sent - watch.began, "ms": 1e3 * (answered - sent)} for sent, answered in sorted(slowest)
    ]
    report["statuses"] = {kind: Counter(client.status() for client in made) for kind, made in watch.kinds.items()}
    for _ in range(SETTLE_SECONDS):
        if resident(process) > before + MEMORY_MARGIN:
            await asyncio.sleep(1)
    report["left"] = await held(url)
    report["memory_mib"] = {"before": before, "most": watch.memory, "after": resident(process)}
    return report


async def _probes(health: Watcher, began: float) -> list[Span]:
    """Probes since a time."""
    return await asyncio.to_thread(health.spans, began, time.monotonic())


def _latencies(probes: Sequence[Span], ordinary: Sequence[Ordinary]) -> dict[str, Any]:
    return {
        "health": percentiles([1e3 * (answered - sent) for sent, answered in probes]),
        "ordinary": [client.report() for client in ordinary],
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unread", type=int, default=1000)
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--half", type=int, default=2000)
    parser.add_argument("--upgrades", type=int, default=200)
    parser.add_argument("--slow", type=int, default=24)
    parser.add_argument("--deadlines", type=int, default=1500)
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--quiet-seconds", type=float, default=10.0)
    parser.add_argument("--max-seconds", type=float, default=300.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        uvloop.run(serve(options.serve, options.unread + options.deadlines + 100))
        return
    with tempfile.TemporaryDirectory() as folder:
        counts = ("--unread", str(options.unread), "--deadlines", str(options.deadlines))
        command = [sys.executable, "-m", "benchmarks.connections", "--serve", folder, *counts]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().strip()
                measured = uvloop.run(measure(url, psutil.Process(process.pid), options))
            finally:
                process.terminate()
    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} CPUs",
        "load_average": psutil.getloadavg(),
        **measured,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
