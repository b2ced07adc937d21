"""What KV events cost a server that publishes them.

    python -m benchmarks.kv_events --out benchmarks/results/FILE.json

Two servers of one model run at the same time, one of which publishes the events of its prefix cache to a subscriber in
this process, which only counts them. They are loaded in turns with prompts without a common prefix, so that each full
block is stored, and evicts another one once the cache is full. Compared is the processor time of the servers, which
is steadier on a shared machine than the time that passes. The cost of a block apart from a model is that of a scheduler
without one, with and without events, in the same process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import httpx
import numpy as np
import zmq

from benchmarks.processes import Server
from benchmarks.tracing import free_port
from quire.app.bench.load import Sample, generate_load
from quire.config.commands import BenchServe
from quire.config.kv_events import KVEventsConfig
from quire.engine.client.protocol import AddRequest
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.kv_events.publisher import KVEventPublisher
from quire.engine.kv_events.recorder import EventRecorder
from quire.engine.scheduling.block_observer import BlockObserver
from quire.engine.scheduling.blocks import BlockPool, hasher_named
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.plan import SampledTokens, StepResult
from quire.engine.scheduling.scheduler import Scheduler

_NANO = Path(__file__).parents[1] / "quire" / "bundled" / "nano"
_BLOCK, _PROMPT, _STEP = 16, 1024, 2048  # tokens


class Counter:
    """Subscribes to events, and counts messages and bytes."""

    def __init__(self, endpoint: str) -> None:
        self.messages = self.bytes = 0
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            frames = self._socket.recv_multipart()
            self.messages += 1
            self.bytes += sum(map(len, frames))


def _ignore(_: Sample) -> None:
    """Nothing is shown."""


def _load(server: Server, requests: int, seed: int, options: argparse.Namespace) -> float:
    """Have requests answered; return the milliseconds of processor time for each."""
    settings = BenchServe(
        url=server.url,
        num_requests=requests,
        concurrency=options.concurrency,
        input_len=options.input_len,
        output_len=options.output_len,
        workload_seed=seed,
    )
    before = server.cpu_seconds()
    name = httpx.get(f"{server.url}/models").json()["data"][0]["id"]
    result = asyncio.run(generate_load(settings, name, _ignore))
    failed = [sample.error for sample in result.samples if sample.error]
    if failed:
        raise RuntimeError(failed[0])
    return (server.cpu_seconds() - before) / requests * 1e3


@contextmanager
def _server(options: argparse.Namespace, folder: Path, config: dict[str, Any] | None) -> Iterator[Server]:
    """A server that is ready. `config`: of its events; None: it publishes none."""
    port = free_port()
    flags = "" if config is None else f"--kv-events-config {shlex.quote(json.dumps(config))}"
    command = f"{sys.executable} -m quire serve {options.model} --port {port} --no-access-log {flags}"
    with Server(command, port, folder / f"{port}.log") as server:
        while not _is_ready(port):
            server.check_running()
            time.sleep(0.1)
        yield server


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.HTTPError:
        return False


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Return the processor time of requests with events, over that without."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        endpoint = f"ipc://{folder}/events"
        counter = Counter(endpoint)
        config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": f"ipc://{folder}/replay"}
        servers = {
            name: stack.enter_context(_server(options, Path(folder), config if name == "on" else None))
            for name in ("on", "off")
        }
        for server in servers.values():
            _load(server, options.requests, options.turns, options)
        times: dict[str, list[float]] = {name: [] for name in servers}
        for turn in range(options.turns):
            for name in ("on", "off") if turn % 2 else ("off", "on"):
                times[name].append(_load(servers[name], options.requests, turn, options))
                print(f"{turn} {name}: {times[name][-1]:.2f} ms per request", flush=True)
        ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
        return {
            "cpu_ms_per_request": {name: [round(value, 3) for value in times[name]] for name in times},
            "ratio": _with_error(ratios),
            "messages": counter.messages,
            "bytes": counter.bytes,
        }


def _scheduler_seconds(observers: Sequence[BlockObserver], requests: int, seed: int) -> float:
    """Return the processor time of this process while a scheduler without a model serves requests."""
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=_STEP, max_model_len=_PROMPT + 8)
    pool = BlockPool(1024, _BLOCK, observers=observers)
    scheduler = Scheduler(limits, pool, hasher=hasher_named("sha256"))
    generator = np.random.default_rng(seed)
    prompts = generator.integers(0, 150_000, (requests, _PROMPT), np.int32)
    before = time.process_time()
    for number, prompt in enumerate(prompts):
        scheduler.add(AddRequest(str(number), prompt, SamplingParams(max_tokens=1)))
        plan = scheduler.schedule()
        scheduler.update(plan, StepResult([SampledTokens(str(number), [1])]))
    return time.process_time() - before


def block_cost(options: argparse.Namespace) -> dict[str, float]:
    """Return the microseconds of processor time of a block in a scheduler, without and with events.

    The time with events is that of all threads: it includes encoding and sending.
    """
    blocks = options.scheduler_requests * _PROMPT // _BLOCK
    times: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns):
            times["off"].append(_scheduler_seconds((), options.scheduler_requests, turn))
            endpoint = f"ipc://{folder}/{turn}"
            publisher = KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint))
            recorder = EventRecorder(publisher.publish)
            times["on"].append(_scheduler_seconds((recorder,), options.scheduler_requests, turn))
            publisher.close()
    return {name: round(median(values) / blocks * 1e6, 3) for name, values in times.items()}


def _with_error(values: Sequence[float]) -> dict[str, float]:
    """Return the mean of values of all turns with its standard error, and their median."""
    error = stdev(values) / len(values) ** 0.5
    return {"mean": round(mean(values), 4), "standard_error": round(error, 4), "median": round(median(values), 4)}


def main() -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=_NANO)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--requests", type=int, default=48, help="of each turn and server")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=300)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--scheduler-requests", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = {
        "model": options.model.name,
        "machine": platform.machine(),
        "date": date.today().isoformat(),
        "settings": {name: getattr(options, name) for name in ("turns", "requests", "input_len", "output_len")},
        "block_microseconds": block_cost(options),
        "servers": compare(options),
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
