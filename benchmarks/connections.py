"""Responsiveness of a server that holds thousands of connections whose clients do nothing.

    python -m benchmarks.connections --out benchmarks/results/FILE.json

Opens streams that are not read, connections that are idle, requests of which only a part is sent, handshakes that are
refused, large bodies that do not go on, readers of one long response, and requests whose deadlines pass together,
against a server with default settings and a fake engine core in another process. Meanwhile a client asks for /health
on new connections, and others send ordinary requests. It ends when the server has closed all the others, and reports
when nothing of them was held any more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

from quire.engine.wire.launch import ProcessCore
from quire.engine.wire.protocol import (
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
from quire.engine.wire.sampling_params import SamplingParams
from quire.engine.wire.transport import CoreChannel
from tests.support.fake_core import INFO
from tests.support.server import running_server
from tests.support.tokenizer import byte_tokenizer

UNREAD = {"prompt": "x", "max_tokens": 480, "stream": True}  # more than fits into buffers
BATCH, TOKENS_PER_STEP, STEP_SECONDS = 20, 4, 0.02  # 4,000 tokens a second
LETTER = byte_tokenizer().encode("a").ids[0]
ORDINARY = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\nContent-Length: 5\r\n\r\n"
)
LARGE_BODY = 31 << 20  # of which two thirds are sent
DEADLINE = 20.0  # seconds after the first of these requests
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def fake_core(address: str) -> None:
    """Generate several tokens in each step for some of the requests, in turn."""
    left: dict[str, int] = {}
    with CoreChannel(address) as channel:
        channel.send(Ready(INFO))
        while True:
            due = time.monotonic() + STEP_SECONDS
            while (message := channel.receive(max(0.0, due - time.monotonic()))) is not None:
                match message:
                    case AddRequest(request_id=request_id, params=SamplingParams() as params):
                        left[request_id] = params.max_tokens
                    case Abort(request_ids=ids):
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
            if outputs:
                running = min(len(left), BATCH)
                channel.send(
                    StepOutput(outputs, StepStats(running, len(left) - running, len(outputs), 1, len(outputs)))
                )


async def serve(folder: Path, capacity: int) -> None:
    """Print the URL of a server on a free port, and serve until killed."""
    async with running_server(folder, fake_core, capacity=capacity, handle=ProcessCore()) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


def post(body: dict[str, Any]) -> bytes:
    """A complete request."""
    content = json.dumps(body)
    return f"{HEAD}Content-Length: {len(content)}\r\n\r\n{content}".encode()


async def open_many(address: tuple[str, int], count: int, data: bytes | Callable[[], bytes]) -> list[socket.socket]:
    """Connections that have sent `data`, or what it returns, and read nothing."""
    loop = asyncio.get_running_loop()

    async def open_one() -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.setblocking(False)
        await loop.sock_connect(made, address)
        with suppress(ConnectionError):  # it was refused meanwhile
            await loop.sock_sendall(made, data if isinstance(data, bytes) else data())
        return made

    made: list[socket.socket] = []
    while len(made) < count:
        made += await asyncio.gather(*(open_one() for _ in range(min(100, count - len(made)))))
    return made


def is_open(connection: socket.socket) -> bool:
    """Whether the server has not closed a connection; what it has sent is read only if it has."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return info[0] == 1  # established


Opener = Callable[[tuple[str, int], int], Awaitable[list[socket.socket]]]


def opener(data: bytes) -> Opener:
    """Opens connections that have sent the same."""
    return partial(open_many, data=data)


async def open_with_deadlines(address: tuple[str, int], count: int) -> list[socket.socket]:
    """Requests whose timeouts pass at the same time."""
    end = time.monotonic() + DEADLINE
    return await open_many(address, count, lambda: post({**UNREAD, "stream": False, "timeout": end - time.monotonic()}))


async def open_readers(address: tuple[str, int], count: int) -> list[socket.socket]:
    """Connections that have read a stored response of 480 tokens, all at the same time."""
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}", timeout=120) as client:
        body = {"input": "x", "max_output_tokens": 480, "background": True, "stream": False}
        made = (await client.post("/v1/responses", json=body)).json()
        while made["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.1)
            made = (await client.get(f"/v1/responses/{made['id']}")).json()
    path = f"/v1/responses/{made['id']}?stream=true"
    readers = await open_many(
        address, count, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )

    async def read(reader: socket.socket) -> None:
        while await loop.sock_recv(reader, 1 << 16):
            pass

    await asyncio.gather(*map(read, readers))
    return readers


def kinds_of(options: argparse.Namespace) -> dict[str, tuple[int, Opener]]:
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
        "readers": (options.readers, open_readers),
    }


class Probe:
    """Sends the same request again and again, and keeps the latencies in milliseconds."""

    def __init__(self, url: str, body: dict[str, Any] | None, pause: float) -> None:
        self._url, self._body, self._pause = url, body, pause
        self.latencies: list[float] = []
        self.failures: list[str] = []

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began = time.monotonic()
            try:
                async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
                    answer = await (
                        client.post("/v1/completions", json=self._body) if self._body else client.get("/health")
                    )
                if answer.status_code != httpx.codes.OK:
                    self.failures.append(str(answer.status_code))
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
            self.latencies.append((time.monotonic() - began) * 1e3)
            await asyncio.sleep(self._pause)

    def report(self) -> dict[str, Any]:
        """What was measured since the last report."""
        taken, self.latencies = sorted(self.latencies), []
        failures, self.failures = self.failures, []
        return {
            "requests": len(taken),
            "failures": failures,
            "p50_ms": statistics.median(taken),
            "p99_ms": taken[int(len(taken) * 0.99)],
            "max_ms": taken[-1],
        }


async def held(url: str) -> dict[str, int]:
    """What the server holds: requests that it answers, and sequences in the engine."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        load = (await client.get("/load")).json()["server_load"]
        page = (await client.get("/metrics")).text
    sequences = sum(
        float(line.split()[-1])
        for line in page.splitlines()
        if re.match(r"quire:num_requests_(running|waiting)\{", line)
    )
    return {"requests": load, "sequences": int(sequences)}


async def measure(url: str, process: psutil.Process, options: argparse.Namespace) -> dict[str, Any]:
    """All phases against a running server."""
    parsed = httpx.URL(url)
    address = (parsed.host, parsed.port or 80)

    def memory() -> float:
        return float(process.memory_info().rss) / 2**20

    health, ordinary = Probe(url, None, 0.05), [Probe(url, ORDINARY, 0.2) for _ in range(4)]
    tasks = [asyncio.create_task(probe.run()) for probe in (health, *ordinary)]
    await asyncio.sleep(options.quiet_seconds)
    report: dict[str, Any] = {"undisturbed": _reports(health, ordinary), "memory_mib": {"before": memory()}}
    began, files = time.monotonic(), process.num_fds()
    kinds = {kind: await open_kind(address, count) for kind, (count, open_kind) in kinds_of(options).items()}
    report["seconds_to_open"] = time.monotonic() - began
    report["opened"] = {kind: len(made) for kind, made in kinds.items()}
    closed: dict[str, float] = {}
    most = memory()
    while len(closed) <= len(kinds) and time.monotonic() - began < options.max_seconds:
        await asyncio.sleep(0.5)
        most = max(most, memory())
        waited = time.monotonic() - began
        for kind, made in kinds.items():
            if kind not in closed and kind != "unread" and not any(map(is_open, made)):
                closed[kind] = waited
        if "all_connections" not in closed and process.num_fds() <= files + 2 * len(tasks):  # of the probes
            closed["all_connections"] = waited
        if "places" not in closed and max((await held(url)).values()) <= 2 * len(ordinary):  # which go on
            closed["places"] = waited
    report["free_after_seconds"] = closed
    report["held"] = _reports(health, ordinary)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(1)
    report["left"] = await held(url)
    report["memory_mib"] |= {"most": most, "after": memory()}
    for made in kinds.values():
        for one in made:
            one.close()
    return report


def _reports(health: Probe, ordinary: list[Probe]) -> dict[str, Any]:
    together = Probe("", None, 0)
    for probe in ordinary:
        together.latencies += probe.latencies
        together.failures += probe.failures
        probe.latencies, probe.failures = [], []
    return {"health": health.report(), "ordinary": together.report()}


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
