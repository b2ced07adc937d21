"""CPU time of the server process per streamed token, with a fake engine core in another process.

    python -m benchmarks.server_cost --streams 64 --tokens 200 --out benchmarks/results/FILE.json

The fake core generates one token per request in each step, at a fixed step time. Only the server process is counted:
ZMQ, detokenization, metrics, stream chunks, HTTP. The client is a third process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import uvloop

from quire.app.bench.load import generate_load
from quire.config.commands import BenchServe
from quire.engine.client.launch import ProcessCore
from quire.engine.client.protocol import (
    Abort,
    AddRequest,
    Ping,
    Pong,
    Ready,
    Shutdown,
    StepOutput,
    StepStats,
    TokensOutput,
)
from quire.engine.client.transport import CoreChannel
from tests.support.fake_core import INFO
from tests.support.server import running_server
from tests.support.tokenizer import byte_tokenizer

STEP_SECONDS = 0.02
LETTER = byte_tokenizer().encode("a").ids[0]


def fake_core(address: str) -> None:
    """Run a fake core that generates one token per request in each step, up to its `max_tokens`."""
    left: dict[str, int] = {}
    with CoreChannel(address) as channel:
        channel.send(Ready(INFO))
        while True:
            due = time.monotonic() + STEP_SECONDS
            while (message := channel.receive(max(0.0, due - time.monotonic()))) is not None:
                match message:
                    case AddRequest():
                        left[message.request_id] = message.sampling_params.max_tokens
                    case Abort(request_ids=ids):
                        for request_id in ids:
                            left.pop(request_id, None)
                    case Ping(serial=serial):
                        channel.send(Pong(serial))
                    case Shutdown():
                        return
            outputs = []
            for request_id, count in list(left.items()):
                outputs.append(TokensOutput(request_id, [LETTER], "length" if count == 1 else None, scheduled_at=due))
                left[request_id] -= 1
                if count == 1:
                    del left[request_id]
            if outputs:
                channel.send(StepOutput(outputs, StepStats(len(outputs), 0, 0, 1, len(outputs))))


async def serve(folder: Path) -> None:
    """Print the URL of a server on a free port, and serve until killed."""
    async with running_server(folder, fake_core, capacity=1000, handle=ProcessCore()) as server:
        gc.freeze()  # as `quire serve` does
        print(server.url, flush=True)
        await asyncio.Event().wait()


class Cost:
    """Send load to a server and reads the CPU time of its process."""

    def __init__(self, pid: int, url: str, streams: int, endpoint: str) -> None:
        self._process = psutil.Process(pid)
        self._settings: dict[str, Any] = {
            "url": url,
            "endpoint": endpoint,
            "num_requests": streams,
            "concurrency": streams,
        }

    def load(self, output: int) -> float:
        """Return CPU seconds for one request of ``output`` tokens in each stream."""
        settings = BenchServe(**self._settings, input_len=2, output_len=output)
        before = self._cpu()
        result = asyncio.run(generate_load(settings, "fake", lambda _: None))
        errors = [sample.error for sample in result.samples if sample.error]
        assert not errors, errors[0]
        return self._cpu() - before

    def _cpu(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def measure(streams: int, tokens: int, endpoint: str) -> dict[str, float]:
    """Return CPU microseconds of the server process per token and per request."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.server_cost", "--serve", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().strip()
                cost = Cost(process.pid, f"{url}/v1", streams, endpoint)
                cost.load(10)
                short, long = cost.load(1), cost.load(tokens)
            finally:
                process.terminate()
    return {
        "us_per_token": (long - short) / (streams * (tokens - 1)) * 1e6,
        "us_per_request": short / streams * 1e6,
    }


def main() -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        uvloop.run(serve(options.serve))
        return
    report = {
        "date": date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "streams": options.streams,
        "tokens": options.tokens,
        **{
            endpoint: [measure(options.streams, options.tokens, endpoint) for _ in range(options.runs)]
            for endpoint in ("completions", "chat")
        },
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
