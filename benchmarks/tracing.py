"""What traces and metrics cost, and the memory of a server whose collector does not work.

    python -m benchmarks.tracing --requests 5000 --out benchmarks/results/FILE.json

Two servers of one model run at a time, one with metrics and with a trace of each request, one with neither. They are
loaded in turns, as the speed of a shared machine changes over minutes; the order changes from turn to turn. They are
started several times, as processes of one program differ in speed, too. Percentiles
of the time to the first token are of all turns together; requests wait for each other while a server is full, so they
are also measured while requests arrive at a rate. The collector is a process that takes spans without reading
them. Then one server each has a collector that works, is down, never answers, or refuses; the memory of the server is
read after each tenth of the requests. It grows until all of the KV cache has been used once. Memory and processor time
are those of the server and of the processes that it has started, of which one exports spans.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import os
import platform
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean, median, quantiles, stdev
from typing import Any, Literal

import grpc
import httpx
import psutil

from quire.app import cli
from quire.app.bench.load import Sample, generate_load
from quire.config.commands import BenchServe
from quire.engine.client.records import Observer

Collector = Literal["takes", "refuses", "slow"]
_NANO = Path(__file__).parents[1] / "quire" / "bundled" / "nano"
_WITH_METRICS, _WITHOUT_METRICS = "with-metrics", "without-metrics"  # how a server is started
_PARTS = 10  # in which memory is read
_PERCENTS = (50, 90, 99)
_RESAMPLES = 200  # of pairs of turns, for the standard errors of percentiles
_ANSWERED = 0.995  # of the requests, at least
_KINDS: tuple[Collector | Literal["down"], ...] = ("takes", "down", "slow", "refuses")


class _NoMetrics(Observer):
    """Records nothing, in the place of metrics."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def describe(self, *_: object) -> None:
        """Publish nothing."""


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Answers all calls in the same way, without reading what they bring."""

    def __init__(self, kind: Collector) -> None:
        self._kind = kind

    def service(self, handler_call_details: Any) -> Any:
        def answer(_: bytes, context: Any) -> bytes:
            if self._kind == "slow":
                time.sleep(3600)
            if self._kind == "refuses":
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "not today")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


def collect(kind: Collector) -> None:
    """Print the port of a collector, and serve until killed."""
    server = grpc.server(ThreadPoolExecutor(4), handlers=[_Handler(kind)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


@contextmanager
def collector(kind: Collector) -> Iterator[int]:
    """The port of a collector in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.tracing", "--collect", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@dataclass(frozen=True, slots=True)
class Turn:
    """What was measured while a server answered requests.

    Attributes:
        cpu: milliseconds of processor time of all processes, for each request.
        ttfts: milliseconds to the first token of each request.
    """

    tokens_per_second: float
    cpu: float
    ttfts: list[float]


class Server:
    """A server on a free port."""

    def __init__(self, model: Path, collector_port: int | None, *, metrics: bool = True) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        start = _WITH_METRICS if metrics else _WITHOUT_METRICS
        command = [sys.executable, "-m", "benchmarks.tracing", start, "serve", str(model), "--port", str(port)]
        command.append("--no-access-log")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        if collector_port is not None:
            command += ["--otlp-traces-endpoint", f"http://127.0.0.1:{collector_port}"]
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._await_ready()

    @property
    def megabytes(self) -> float:
        """The memory of all processes."""
        return round(sum(process.memory_info().rss for process in self._processes()) / 1e6, 1)

    def load(self, requests: int, options: argparse.Namespace, seed: int, rate: float | None = None) -> Turn:
        """Have requests answered; `rate`: how many arrive per second, at most. None: `concurrency` all the time."""
        settings = BenchServe(
            url=f"{self.url}/v1",
            num_requests=requests,
            concurrency=options.concurrency if rate is None else requests,
            request_rate=rate,
            input_len=options.input_len,
            output_len=options.output_len,
            workload_seed=seed,
        )
        name, before = self._model(), self._cpu_seconds()
        result = asyncio.run(generate_load(settings, name, _ignore))
        cpu_seconds = self._cpu_seconds() - before
        samples = [sample for sample in result.samples if not sample.error]
        if len(samples) < _ANSWERED * requests:  # few answers of a small model have tokens that are no text
            raise RuntimeError(next(sample.error for sample in result.samples if sample.error))
        tokens = sum(sample.output_tokens for sample in samples)
        return Turn(tokens / result.seconds, cpu_seconds / requests * 1e3, [sample.ttft * 1e3 for sample in samples])

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes()]
        return float(sum(time.user + time.system for time in times))

    def _processes(self) -> list[psutil.Process]:
        server = psutil.Process(self._process.pid)
        return [server, *server.children(recursive=True)]

    def _model(self) -> str:
        name: str = httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"]
        return name

    def _await_ready(self) -> None:
        while self._process.poll() is None:
            try:
                httpx.get(f"{self.url}/ready").raise_for_status()
            except httpx.HTTPError:
                time.sleep(0.1)
            else:
                return
        raise RuntimeError(f"the server ended with code {self._process.returncode}")


def _ignore(_: Sample) -> None:
    """Nothing is shown."""


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """How much more a server with traces and metrics takes: while it is full, and while requests arrive at a rate."""
    rates: dict[str, float | None] = {"full": None, **({"at_a_rate": options.rate} if options.rate else {})}
    turns: dict[str, dict[str, list[Turn]]] = {kind: {"traced": [], "plain": []} for kind in rates}
    dropped = 0.0
    with collector("takes") as port:
        for pair in range(options.pairs):
            with _pair_of_servers(options, port, is_first_traced=pair % 2 == 0) as servers:
                for kind, number in itertools.product(rates, range(pair, options.turns, options.pairs)):
                    for name in list(servers) if number // options.pairs % 2 == 0 else list(servers)[::-1]:
                        turn = servers[name].load(options.requests // options.turns, options, number, rates[kind])
                        turns[kind][name].append(turn)
                        print(f"{kind} {number} {name}: {turn.tokens_per_second:.0f} tokens/s", flush=True)
                dropped += servers["traced"].metric("quire:trace_spans_dropped_total")
    return {**{kind: _differences(turns[kind]) for kind in rates}, "spans_dropped": dropped}


@contextmanager
def _pair_of_servers(options: argparse.Namespace, port: int, *, is_first_traced: bool) -> Iterator[dict[str, Server]]:
    """A server with traces and metrics, and one without. `is_first_traced`: that one is started first."""
    servers: dict[str, Server] = {}
    try:
        for name in ("traced", "plain") if is_first_traced else ("plain", "traced"):
            traced = name == "traced"
            servers[name] = Server(options.model, port if traced else None, metrics=traced)
            servers[name].load(max(1, options.requests // 50), options, seed=options.turns)
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def _differences(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    pairs = list(zip(turns["traced"], turns["plain"], strict=True))
    ratios = [traced.tokens_per_second / plain.tokens_per_second for traced, plain in pairs]
    percentiles = {name: _ttft_percentiles(turns[name]) for name in turns}
    resampled = [random.choices(pairs, k=len(pairs)) for _ in range(_RESAMPLES)]
    more = [[_ttft_percentiles(side) for side in zip(*sample, strict=True)] for sample in resampled]
    return {
        "tokens_per_second": {name: [round(turn.tokens_per_second, 1) for turn in turns[name]] for name in turns},
        "throughput_ratio": _with_error(ratios),
        "cpu_ms_per_request": {name: round(mean(turn.cpu for turn in turns[name]), 3) for name in turns},
        "cpu_ms_more": _with_error([traced.cpu - plain.cpu for traced, plain in pairs]),
        **{
            f"ttft_p{percent}_ms": {name: round(percentiles[name][percent - 1], 2) for name in turns}
            for percent in _PERCENTS
        },
        "ttft_more_ms_standard_error": {
            f"p{percent}": round(stdev(traced[percent - 1] - plain[percent - 1] for traced, plain in more), 2)
            for percent in _PERCENTS
        },
    }


def _ttft_percentiles(turns: Iterable[Turn]) -> list[float]:
    """The times to the first token of all turns, from that of 1 % to that of 99 %."""
    return quantiles(itertools.chain(*(turn.ttfts for turn in turns)), n=100)


def _with_error(values: list[float]) -> dict[str, float]:
    """The mean of values of all turns, and its standard error."""
    error = stdev(values) / len(values) ** 0.5
    return {"mean": round(mean(values), 4), "standard_error": round(error, 4), "median": round(median(values), 4)}


def memory(kind: Collector | Literal["down"], options: argparse.Namespace) -> dict[str, Any]:
    """The memory of a server after each part of the requests, whose collector does not work."""
    if kind == "down":
        return _memory(free_port(), options)
    with collector(kind) as port:
        return _memory(port, options)


def _memory(port: int, options: argparse.Namespace) -> dict[str, Any]:
    server = Server(options.model, port)
    try:
        megabytes = []
        for part in range(_PARTS):
            server.load(options.requests // _PARTS, options, seed=part)
            megabytes.append(server.megabytes)
        return {"megabytes": megabytes, "spans_dropped": server.metric("quire:trace_spans_dropped_total")}
    finally:
        server.stop()


def main() -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=_NANO)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=5, help="how often both servers are started")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second; 0: only while servers are full")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--no-memory", action="store_true", help="measure the cost only")
    parser.add_argument("--no-cost", action="store_true", help="measure the memory only")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--collect", choices=("takes", "refuses", "slow"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.collect is not None:
        collect(options.collect)
        return
    cli.prepare_process()  # both servers get the variables that it sets, before they import anything
    report = {
        "date": date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        **{name: getattr(options, name) for name in ("requests", "concurrency", "rate", "input_len", "output_len")},
        "cost": {} if options.no_cost else compare(options),
        "memory": {} if options.no_memory else {kind: memory(kind, options) for kind in _KINDS},
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(f"{text}\n", encoding="utf-8")


def serve(start: str, arguments: list[str]) -> None:
    """Run a command in the same way with metrics and without."""
    if start == _WITHOUT_METRICS:
        lifecycle: Any = importlib.import_module("quire.app.lifecycle")
        lifecycle.ModelMetrics = _NoMetrics
    cli.main(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] in ([_WITH_METRICS], [_WITHOUT_METRICS]):
        serve(sys.argv[1], sys.argv[2:])
    else:
        main()
