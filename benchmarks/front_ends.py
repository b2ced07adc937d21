"""Compares servers with one and with several processes before the engine (--api-server-count), in turns.

    python -m benchmarks.front_ends MODEL --counts 1 2 --runs 3 --out FILE.json

Renders of chats take the time of front ends alone: clients on many connections, each of which sends its next request
when it has its answer. A single stream takes that of the engine and of what is between it and the client. Memory is
that of the server and its children (PSS, which counts shared pages once), after the renders. The clients run on the
same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import uvloop

from benchmarks.processes import memory_of
from quire.app.bench.server_process import serve_command, started_server
from quire.app.bench.startup import free_port, spread_of, usage_of, wait_until_ready

_TIMEOUT = 600.0
_FIGURES = ("ready_s", "memory_mb", "renders_per_s", "stream_s")


def main() -> None:
    """Measure and write the results."""
    options = _parsed()
    rows: dict[int, list[dict[str, float]]] = {count: [] for count in options.counts}
    for number in range(options.runs + options.warm_up):
        for count in options.counts:
            row = _measured(options, count)
            if number >= options.warm_up:
                rows[count].append(row)
    first, *others = options.counts
    result = {
        "command": f"python -m benchmarks.front_ends {Path(options.model).name} --counts {' '.join(map(str, rows))} "
        f"--runs {options.runs} --warm-up {options.warm_up} --connections {options.connections} "
        f"--renders {options.renders} --tokens {options.tokens}",
        "figures": {
            count: {figure: spread_of([row[figure] for row in rows[count]]) for figure in _FIGURES} for count in rows
        },
        "ratios": {
            count: {
                figure: median(
                    several[figure] / single[figure] for single, several in zip(rows[first], rows[count], strict=True)
                )
                for figure in _FIGURES
            }
            for count in others
        },
        "runs": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"figures": result["figures"], "ratios": result["ratios"]}, indent=1))


def _measured(options: argparse.Namespace, count: int) -> dict[str, float]:
    port = free_port()
    words = serve_command(options.model, "--port", str(port), "--api-server-count", str(count), "--no-access-log")
    started = time.perf_counter()
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started_server(words, **silent) as process, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        wait_until_ready(client, process, started + _TIMEOUT)
        ready = time.perf_counter() - started
        begun = usage_of(process.pid)["cpu_s"]
        renders = uvloop.run(_renders_per_second(port, options.connections, options.renders))
        cpu = (usage_of(process.pid)["cpu_s"] - begun) / options.renders
        memory = memory_of(process.pid)
        streams = [_seconds_of_stream(client, options.tokens) for _ in range(3)]
    figures = {"ready_s": ready, "memory_mb": memory, "renders_per_s": renders, "stream_s": min(streams)}
    return {**figures, "cpu_ms_per_render": 1000 * cpu}


async def _renders_per_second(port: int, connections: int, count: int) -> float:
    """Renders of different chats of about 200 words by clients on connections of their own."""
    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(connections)]
    numbers = iter(range(-connections, count))
    begun = 0.0

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal begun
        for number in numbers:
            if number >= 0 and not begun:
                begun = time.perf_counter()
            text = f"Question {number}: " + "what is the weather like in spring? " * 25
            body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
            head = b"POST /v1/chat/completions/render HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
        writer.close()

    await asyncio.gather(*(client(*pair) for pair in pairs))
    return count / (time.perf_counter() - begun)


def _seconds_of_stream(client: httpx.Client, tokens: int) -> float:
    begun = time.perf_counter()
    body = {"prompt": "Hello", "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    client.post("/v1/completions", json=body, timeout=_TIMEOUT).raise_for_status()
    return time.perf_counter() - begun


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--renders", type=int, default=1500)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
