"""CPU time that the server's process takes to refuse a large chat while its queue is full.

    python -m benchmarks.admission --characters 100000 --out benchmarks/results/FILE.json

The prompt has 100,000 characters, and the answer is constrained by a JSON schema. For comparison, the same requests are
sent to a server with room, which renders and tokenizes the prompt and compiles the grammar before the engine gets it.
The core generates nothing. Only the server's process is counted; the client is another process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

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
from tests.support.tokenizer import EOS

WORDS = "time year people way day man thing woman life child world school state family student group country "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 100},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}, "code": {"pattern": "^[0-9]{5}$"}},
            "required": ["street", "city"],
        },
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ending_core(address: str) -> None:
    """End every request at once."""
    with CoreChannel(address) as channel:
        channel.send(Ready(INFO))
        while True:
            match channel.receive(1.0):
                case AddRequest(request_id=request_id):
                    output = TokensOutput(request_id, [EOS], "stop", scheduled_at=0.0)
                    channel.send(StepOutput([output], StepStats(1, 0, 0, 1, 1)))
                case Ping(serial=serial):
                    channel.send(Pong(serial))
                case Shutdown():
                    return
                case Abort() | None:
                    pass


async def serve(folder: Path, full: bool) -> None:
    """Listen on a free port, whose address is printed, until killed. `full`: with all slots in use."""
    async with running_server(folder, ending_core, capacity=4, handle=ProcessCore()) as server:
        client = server.state.models[0].client
        with client.slots(client.capacity if full else 0):
            print(server.url, flush=True)
            await asyncio.Event().wait()


def body_of(characters: int, number: int) -> dict[str, Any]:
    """A chat whose prompt and schema differ from those of other numbers, so that nothing is cached."""
    text = f"{number} {WORDS * (characters // len(WORDS) + 1)}"[:characters]
    schema = {**SCHEMA, "title": f"Person {number}"}
    return {
        "messages": [{"role": "user", "content": text}],
        "truncate_prompt_tokens": 100,  # the prompt is longer than the context of the model without weights
        "max_tokens": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    }


def measure(characters: int, requests: int, *, full: bool) -> dict[str, Any]:
    """CPU milliseconds of the server's process per request."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.admission", "--serve", folder, *(["--full"] if full else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().strip()
                server = psutil.Process(process.pid)
                with httpx.Client(base_url=url, timeout=60) as client:
                    _send(client, characters, range(10), full)
                    before = server.cpu_times()
                    _send(client, characters, range(10, 10 + requests), full)
                    after = server.cpu_times()
            finally:
                process.terminate()
    seconds = after.user + after.system - before.user - before.system
    return {"requests": requests, "cpu_ms_per_request": seconds / requests * 1e3}


def _send(client: httpx.Client, characters: int, numbers: range, full: bool) -> None:
    for number in numbers:
        answer = client.post("/v1/chat/completions", json=body_of(characters, number))
        assert answer.status_code == (503 if full else 200), answer.text[:200]
        assert not full or "retry-after" in answer.headers


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--characters", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--full", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        uvloop.run(serve(options.serve, options.full))
        return
    refused = [measure(options.characters, options.requests, full=True) for _ in range(options.runs)]
    accepted = [measure(options.characters, max(1, options.requests // 10), full=False) for _ in range(options.runs)]
    report = {
        "date": date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "characters": options.characters,
        "refused": refused,
        "accepted": accepted,
        "refused_cpu_ms_median": statistics.median(run["cpu_ms_per_request"] for run in refused),
        "accepted_cpu_ms_median": statistics.median(run["cpu_ms_per_request"] for run in accepted),
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
